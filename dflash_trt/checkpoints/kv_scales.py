"""The scales of an FP8 KV cache that a checkpoint states, one for K and one for V of each layer.

ModelOpt writes `…self_attn.k_proj.k_scale` and `…self_attn.v_proj.v_scale`, others
`…self_attn.k_scale` and `…self_attn.v_scale`: scalars; code · scale is the value. Those of a cache
in another format belong to other codes, and FP8's would clip by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dflash_trt.checkpoints.quantization import Quantization
from dflash_trt.checkpoints.quantized_weights import KV_SCALE_SUFFIXES, read_scalar
from dflash_trt.checkpoints.safetensors_header import TensorEntry
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError

UNSTATED = 1.0
"""The scale of a cache of which the checkpoint says nothing: E4M3 reaches 448."""


def are_fp8(kv_cache_algorithm: str | None) -> bool:
    """Whether the scales beside a cache that is so stated are FP8's; unstated ones are."""
    return kv_cache_algorithm in (None, "FP8")


def read_kv_scales(
    tensors: Mapping[str, TensorEntry],
    weights: Mapping[str, TensorEntry],
    quantization: Quantization | None,
    layer: int,
) -> tuple[float, float]:
    """The scales of K and V of one layer, `UNSTATED` where the checkpoint has none of FP8.

    Args:
        tensors: all of a checkpoint's, by name.
        weights: the same checkpoint's, by role.
        quantization: what the checkpoint states.

    Raises:
        DflashError: one that is no F32 scalar, or not a finite number above 0.
    """
    if quantization is not None and not are_fp8(quantization.kv_cache_algorithm):
        return UNSTATED, UNSTATED
    module = weights[f"layers.{layer}.k_proj"].name.removesuffix("k_proj.weight")
    found = {
        kind: [entry for suffix in suffixes if (entry := tensors.get(f"{module}{suffix}"))]
        for kind, suffixes in KV_SCALE_SUFFIXES.items()
    }
    k, v = (_read(entries[0]) if entries else UNSTATED for entries in found.values())
    return k, v


def _read(entry: TensorEntry) -> float:
    if entry.dtype != "F32" or math.prod(entry.shape) != 1:
        raise _wrong(entry, f"it is {entry.dtype} {list(entry.shape)}, not an F32 scalar")
    value = read_scalar(entry)
    if not math.isfinite(value) or value <= 0:
        raise _wrong(entry, f"its value is {value:g}, not a finite number above 0")
    return value


def _wrong(entry: TensorEntry, what: str) -> DflashError:
    return DflashError(
        f"tensor {quoted(entry.name)}: {what}",
        where=entry.file,
        fix="export the checkpoint again, or leave out --kv-dtype fp8",
    )

"""The scales of an FP8 KV cache that a checkpoint states, one for K and one for V of each layer.

ModelOpt writes `…self_attn.k_proj.k_scale` and `…self_attn.v_proj.v_scale`, others leave out the
projection. Scales of a cache in another format belong to other codes: FP8's would clip by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dflash_trt.checkpoints.quantization import Quantization
from dflash_trt.checkpoints.quantized_weights import KV_SCALE_SUFFIXES, read_positive_scalar
from dflash_trt.checkpoints.safetensors_header import TensorEntry

_FIX = "export the checkpoint again, or leave out --kv-dtype fp8"
UNSTATED = 1.0
"""The scale where the checkpoint states none: E4M3 reaches 448."""


def are_fp8(kv_cache_algorithm: str | None) -> bool:
    """Whether a cache that is stated so has FP8's scales; an unstated one has."""
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
        raise entry.error(f"it is {entry.dtype} {list(entry.shape)}, not an F32 scalar", _FIX)
    return read_positive_scalar(entry, _FIX)

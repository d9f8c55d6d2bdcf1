"""Writes checkpoints with random weights, or with sparse files in place of weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_trt.quantization.tensor_rows import TensorLayout, shard_header

_RANDOM_TYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}
_CHUNK = 1 << 24
STATES_KV_SCALES = {
    "quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
}
"""What a config.json says beside the tensors of `kv_scales`, if it has no quantisation yet."""
# Of MXFP4 blocks: E2M1's values of about 3 become weights of about 0.05.
_MX_SCALE = 121

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name → (safetensors dtype code, shape)."""


def kv_scales(prefix: str, layers: int) -> Tensors:
    """The tensors that state an FP8 cache's scales, of every layer below `prefix`."""
    return {
        f"{prefix}.{number}.self_attn.{kind}_proj.{kind}_scale": ("F32", (1,))
        for number in range(layers)
        for kind in "kv"
    }


def write_checkpoint(
    folder: Path, config: dict[str, Any], tensors: Tensors, *, random: bool
) -> int:
    """Writes `config` and `tensors`; returns the bytes of weights.

    They are small and random with `random`, if large with repeats, which are made quickly; without
    it the file is sparse, and takes no disk.
    """
    full: dict[tuple[str, int, str], bytes] = {}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    layouts = [TensorLayout(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
    header, size = shard_header(layouts), sum(one.num_bytes for one in layouts)
    generator = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        for one in layouts if random else ():
            for left in range(math.prod(one.shape), 0, -_CHUNK):
                count, kind = min(left, _CHUNK), (one.dtype, one.shape[-1], one.name[-7:])
                data = full.get(kind) if count == _CHUNK else None
                data = data or _random_bytes(generator, one, count)
                if count == _CHUNK:
                    full[kind] = data
                file.write(data)
        file.truncate(len(header) + size)
    return size


def _random_bytes(generator: np.random.Generator, tensor: TensorLayout, count: int) -> bytes:
    """`count` elements of `tensor`; MXFP4 as its codes.

    Matrices keep the size of what they multiply, so that no softmax is nearly a choice, and another
    precision gives about the same. Norms are about 1. The scales of KV caches are such that K and V
    of these weights fit E4M3.
    """
    if tensor.name.endswith("_scales"):
        return bytes([_MX_SCALE]) * count
    if tensor.dtype == "U8":
        return generator.bytes(count)
    size = 0.1 if len(tensor.shape) == 1 else 1 / math.sqrt(tensor.shape[-1])
    weights = generator.standard_normal(count, np.float32) * np.float32(size)
    if tensor.name.endswith("_scale"):
        weights = np.abs(weights) + np.float32(0.01)
    weights += np.float32(tensor.name.endswith("norm.weight"))
    return weights.astype(_RANDOM_TYPES[tensor.dtype]).tobytes()

"""What `kv_feature_injection` makes of its inputs in float64."""

from __future__ import annotations

import numpy as np

from dflash_plugins.operation import Case, DType
from dflash_plugins.testing.cache_writes import KV_SCALES, write_rows
from dflash_plugins.testing.numeric import Array
from dflash_trt.quantization.formats import encode_e4m3


def inject(case: Case, inputs: dict[str, Array]) -> tuple[Array, Array]:
    """Both caches afterwards; k and v in float64, rounded only where the function's body rounds."""
    narrow = case.inputs["k"].dtype.numpy
    k, v = (inputs[name].astype(np.float64) for name in "kv")
    half = k.shape[-1] // 2
    norm = 1 / np.sqrt((k**2).mean(-1, keepdims=True) + case.attributes["epsilon"])
    k = k * norm * inputs["k_norm"].astype(np.float64)
    if case.inputs["k"].dtype is not DType.FLOAT32:
        k = k.astype(narrow).astype(np.float64)
    positions = np.maximum(inputs["positions"], 0)
    cos, sin = (inputs[name].astype(np.float64)[positions][:, :, None] for name in ("cos", "sin"))
    near, far = k[..., :half], k[..., half:]
    k = np.concatenate([near * cos - far * sin, far * cos + near * sin], axis=-1)
    k_cache, v_cache = (
        _write(inputs, name, rows.astype(narrow).astype(np.float32) / scale)
        if "kv_scales" in inputs
        else _write(inputs, name, rows)
        for name, rows, scale in zip(("k_cache", "v_cache"), (k, v), KV_SCALES, strict=True)
    )
    return k_cache, v_cache


def _write(inputs: dict[str, Array], name: str, rows: Array) -> Array:
    """A cache in float64 with rows [B,S,H_kv,D] where they belong; FP8 codes as their values."""
    if "kv_scales" in inputs:
        rows = encode_e4m3(rows).view(DType.FLOAT8.numpy).astype(np.float64)
    return write_rows(inputs, inputs[name].astype(np.float64), rows)

"""What `kv_feature_injection` makes of its inputs in float64."""

from __future__ import annotations

import numpy as np

from dflash_plugins.operation import Case, DType
from dflash_plugins.testing.cache_writes import KV_SCALES, write_rows
from dflash_plugins.testing.numeric import Array, epsilon, relative, sum_error, tiny
from dflash_trt.quantization.formats import encode_e4m3

NORM_ROUNDINGS = 8
"""Of the mean, its root's reciprocal (right to two units in the last place), and two products."""


def inject(case: Case, inputs: dict[str, Array]) -> tuple[Array, Array]:
    """Both caches afterwards; k and v in float64, rounded only where the function's body rounds."""
    narrow = case.inputs["k"].dtype.numpy
    k, cos, sin = _normed(case, inputs)
    half = k.shape[-1] // 2
    near, far = k[..., :half], k[..., half:]
    k = np.concatenate([near * cos - far * sin, far * cos + near * sin], axis=-1)
    v = inputs["v"].astype(np.float64)
    k_cache, v_cache = (
        _write(inputs, name, rows.astype(narrow).astype(np.float32) / scale)
        if "kv_scales" in inputs
        else _write(inputs, name, rows)
        for name, rows, scale in zip(("k_cache", "v_cache"), (k, v), KV_SCALES, strict=True)
    )
    return k_cache, v_cache


def error_bound(
    case: Case, inputs: dict[str, Array], expected: Array, *, products: int = 0, cut: bool = False
) -> Array:
    """The largest `relative_error` of k's cache `expected`; v's rows are copied as they are.

    k is divided by the root of a mean of D squares, which errs by half of what their sum does, and
    rounded to its own type; then two products of it are added, in float32, and stored.

    Args:
        products: 1 where those products and their sum are rounded to k's type too.
        cut: whether float32 is cut off instead of rounded to that type: an error twice as large.
    """
    dtype, wide = case.inputs["k"].dtype.numpy, epsilon(np.float32)
    narrow = (1 + cut) * epsilon(dtype)
    k, cos, sin = (np.abs(part) for part in _normed(case, inputs))
    size = k.shape[-1]
    near, far = k[..., : size // 2], k[..., size // 2 :]
    terms = np.concatenate([near * cos + far * sin, far * cos + near * sin], axis=-1)
    norm = sum_error(size, 1.0, wide) / 2 + NORM_ROUNDINGS * wide
    rows = terms * (norm + (1 + products) * narrow + 2 * wide)
    rows = rows + (1 + products) * narrow * terms + 4 * (1 + cut) * tiny(dtype)
    return relative(write_rows(inputs, np.zeros(expected.shape), rows), expected)


def _normed(case: Case, inputs: dict[str, Array]) -> tuple[Array, Array, Array]:
    """k [B,S,H_kv,D] before it is rotated, and its cos and sin [B,S,1,D/2]."""
    narrow = case.inputs["k"].dtype
    k = inputs["k"].astype(np.float64)
    norm = 1 / np.sqrt((k**2).mean(-1, keepdims=True) + case.attributes["epsilon"])
    k = k * norm * inputs["k_norm"].astype(np.float64)
    if narrow is not DType.FLOAT32:
        k = k.astype(narrow.numpy).astype(np.float64)
    positions = np.maximum(inputs["positions"], 0)
    cos, sin = (inputs[name].astype(np.float64)[positions][:, :, None] for name in ("cos", "sin"))
    return k, cos, sin


def _write(inputs: dict[str, Array], name: str, rows: Array) -> Array:
    """A cache in float64 with rows [B,S,H_kv,D] where they belong; FP8 codes as their values."""
    if "kv_scales" in inputs:
        rows = encode_e4m3(rows).view(DType.FLOAT8.numpy).astype(np.float64)
    return write_rows(inputs, inputs[name].astype(np.float64), rows)

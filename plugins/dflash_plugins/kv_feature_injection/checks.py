"""The check of `kv_feature_injection` on a GPU: bfloat16 and FP8 stores included, and times."""

from __future__ import annotations

from functools import partial

import numpy as np

from dflash_plugins.kv_caches import WriteShape, public_cases
from dflash_plugins.kv_feature_injection.launch import LAYOUTS, make_case
from dflash_plugins.operation import Case, DType
from dflash_plugins.testing.cache_writes import (
    MEASURED_LENGTH,
    checked_shapes,
    make_inputs,
    write_points,
    write_rows,
)
from dflash_plugins.testing.gpu import Point
from dflash_plugins.testing.numeric import (
    KV_SCALES,
    Accuracy,
    Array,
    Check,
    Run,
    epsilon,
    judge,
    relative,
    sum_error,
    tiny,
)
from dflash_trt.quantization.codecs import encode_e4m3

CODE = 2 * epsilon(DType.FLOAT8.numpy)
"""The step between E4M3 codes: k is rounded to its own type first, which may move it one code."""

NORM_ROUNDINGS = 8
"""Roundings of the mean, of its rsqrt (right to two units in the last place) and two products."""

FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
CACHES = [*zip(FLOATS, FLOATS, strict=True), *((one, DType.FLOAT8) for one in FLOATS[1:])]
"""Element types of the rows and of the cache."""


def checks() -> list[Check]:
    """Every layout and type against float64, at cache and page borders; v must be exact."""
    layouts = [(*types, page_size) for types in CACHES for page_size in (None, 32)]
    return [
        Check(f"kv_feature_injection, {shape}", partial(check_shape, shape))
        for shape in checked_shapes(layouts, (16,), 256)
    ]


def check_shape(shape: WriteShape, run: Run) -> list[Accuracy]:
    """The results for K and for V."""
    case = make_case(shape)
    inputs = make_inputs(case, [0, 24, 100, 240])
    outputs = run(case.operation.name, inputs, case.attributes)
    both = inject(case, inputs)
    is_coded = shape.cache is DType.FLOAT8
    bounds: list[float | Array]
    bounds = [CODE if is_coded else error_bound(case, inputs, both[0]), 0.0]
    return [
        judge(f"kv_feature_injection, {shape}, {name}", outputs[name], expected, bound)
        for name, expected, bound in zip(outputs, both, bounds, strict=True)
    ]


def inject(case: Case, inputs: dict[str, Array]) -> tuple[Array, Array]:
    """The expected K and V caches, in float64 and rounded only where the graph function rounds."""
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
    case: Case, inputs: dict[str, Array], expected: Array, *, cut: bool = False
) -> Array:
    """Bounds the `relative_error` of the K cache `expected`; V is copied and has no error.

    k is divided by the root of a mean of D squares, whose relative error is half that of the sum,
    and rounded to its own type. RoPE adds two products in float32 and stores the sum. `cut` says
    that float32 is truncated to that type instead of rounded: twice the error.
    """
    dtype, wide = case.inputs["k"].dtype.numpy, epsilon(np.float32)
    narrow = (1 + cut) * epsilon(dtype)
    k, cos, sin = (np.abs(part) for part in _normed(case, inputs))
    size = k.shape[-1]
    near, far = k[..., : size // 2], k[..., size // 2 :]
    terms = np.concatenate([near * cos + far * sin, far * cos + near * sin], axis=-1)
    norm = sum_error(size, 1.0, wide) / 2 + NORM_ROUNDINGS * wide
    rows = terms * (norm + 2 * narrow + 2 * wide) + 4 * (1 + cut) * tiny(dtype)
    return relative(write_rows(inputs, np.zeros(expected.shape), rows), expected)


def _normed(case: Case, inputs: dict[str, Array]) -> tuple[Array, Array, Array]:
    """k [B,S,H_kv,D] after k_norm and before RoPE, and its cos and sin [B,S,1,D/2]."""
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
    """The cache `name` in float64 with rows [B,S,H_kv,D] written; FP8 codes as their values."""
    if "kv_scales" in inputs:
        rows = encode_e4m3(rows).view(DType.FLOAT8.numpy).astype(np.float64)
    return write_rows(inputs, inputs[name].astype(np.float64), rows)


ROWS = ((1, 16), (8, 16), (64, 16), (1, 2048))
"""(Sequences, rows of each): three verify steps and one prefill chunk."""


def points() -> list[Point]:
    """The heads of public drafts, in every form of caches."""
    return write_points(public_cases(make_case, LAYOUTS, ROWS, MEASURED_LENGTH))

"""What kernels' caches store, against the NumPy codec; what block_attention is, by loops."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from dflash_trt.graph.block_attention import block_attention_function
from dflash_trt.graph.form import CacheDtype, GraphForm, Precision
from dflash_trt.graph.kv_cache_update import kv_cache_update_function, kv_feature_injection_function
from dflash_trt.quantization.codecs import dequantize_fp8, quantize_fp8
from tests.graph.functions import Array, attend, random, run_function

BATCH, KV_HEADS, HEADS, HEAD_DIM, ROWS = 2, 2, 6, 16, 5
LENGTH, SIZE, PAGES = 24, 8, 7
STARTS = (3, 19)
TABLE = np.array([[5, 0, 6], [2, 4, 1]], np.int32)  # sequence 0 holds no third page: nobody's
SCALES = np.array([0.03, 1.75], np.float32)
FORMS = [(True, False), (False, True), (True, True)]
"""Paged, FP8 or both."""


def form(precision: Precision, *, is_paged: bool, is_fp8: bool = True) -> GraphForm:
    dtype = CacheDtype.FP8 if is_fp8 else CacheDtype.COMPUTE
    return GraphForm(precision, page_size=SIZE if is_paged else None, cache_dtype=dtype)


def operands(made: GraphForm) -> dict[str, Array]:
    table: dict[str, Array] = {"page_table": TABLE} if made.is_paged else {}
    return table | ({"kv_scales": SCALES} if made.is_fp8 else {})


def attributes(made: GraphForm) -> dict[str, int]:
    return {"page_size": SIZE} if made.is_paged else {}


def caches(made: GraphForm) -> dict[str, Array]:
    shape = (PAGES, SIZE, KV_HEADS, HEAD_DIM) if made.is_paged else (2, KV_HEADS, LENGTH, HEAD_DIM)
    kind: Any = made.precision.value
    if made.cache_type == TensorProto.FLOAT8E4M3FN:
        kind = ml_dtypes.float8_e4m3fn
    return {f"{kv}_cache": random(seed, *shape).astype(kind) for seed, kv in enumerate("kv", 1)}


def place(made: GraphForm, b: int, position: int) -> Any:
    """The index of one position's heads in a cache."""
    if made.is_paged:
        return TABLE[b, position // SIZE], position % SIZE
    return b, slice(None), position


def values(kind: Any) -> Array:
    """K or V with what FP8 does to every range of numbers: ties, denormals, more than 448."""
    many = random(9, 4, BATCH, KV_HEADS, ROWS, HEAD_DIM)
    many *= np.array([0.0005, 0.3, 3, 200])[:, None, None, None, None]
    picked = np.random.default_rng(2).integers(0, 4, many.shape[1:])
    rows = np.take_along_axis(many, picked[None], 0)[0]
    rows[0, 0, 0, :6] = [0, -0.0, 0.53125 * 0.03, 1e4, -1e4, 2.0**-11]
    return rows.astype(kind)


@pytest.mark.numeric
@pytest.mark.parametrize(("is_paged", "is_fp8"), FORMS)
@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.FLOAT16])
def test_an_update_stores_what_the_codec_says(
    precision: Precision, is_paged: bool, is_fp8: bool
) -> None:
    """float32 caches the values, narrow ones the codes: the same numbers; nothing else changes."""
    made = form(precision, is_paged=is_paged, is_fp8=is_fp8)
    before = caches(made)
    rows = {"k": values(precision.value), "v": values(precision.value)[::-1].copy()}
    positions = np.array([np.arange(start, start + ROWS) for start in STARTS])
    feeds = {**rows, **before, "positions": positions, **operands(made)}
    after = run_function(kv_cache_update_function(made), feeds, **attributes(made))
    for kv, scale, got in zip("kv", SCALES, after, strict=True):
        expected, stored = before[f"{kv}_cache"].copy(), rows[kv]
        if is_fp8:
            codes = quantize_fp8(stored.astype(np.float32), scale)
            stored = codes.view(np.uint8) if made.holds_codes else dequantize_fp8(codes, scale)
        if made.holds_codes:
            expected = expected.view(np.uint8)
        for b, row in np.ndindex(BATCH, ROWS):
            expected[place(made, b, positions[b, row])] = stored[b, :, row]
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("is_paged", [False, True])
def test_an_injection_rounds_what_the_plain_one_writes(is_paged: bool) -> None:
    feeds = {kv: random(seed, BATCH, ROWS, KV_HEADS, HEAD_DIM) for seed, kv in enumerate("kv", 3)}
    feeds["k_norm"] = random(5, HEAD_DIM)
    feeds |= {name: random(seed, 40, HEAD_DIM // 2) for seed, name in enumerate(("cos", "sin"), 6)}
    feeds["positions"] = np.array([np.arange(start, start + ROWS) for start in STARTS])
    results = []
    for is_fp8 in (False, True):
        made = form(Precision.FLOAT32, is_paged=is_paged, is_fp8=is_fp8)
        function = kv_feature_injection_function(made)
        given = feeds | caches(made) | operands(made)
        results.append(run_function(function, given, epsilon=1e-6, **attributes(made)))
    for kv, scale, plain, got in zip("kv", SCALES, *results, strict=True):
        expected = caches(made)[f"{kv}_cache"]
        for b, start in enumerate(STARTS):
            for position in range(start, start + ROWS):
                at = place(made, b, position)
                expected[at] = dequantize_fp8(quantize_fp8(plain[at], scale), scale)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("is_causal", "window"), [(1, 0), (0, 0), (1, 6), (0, 6), (1, 1)])
@pytest.mark.parametrize(("is_paged", "is_fp8"), FORMS)
def test_attention_by_loops(
    is_paged: bool, is_fp8: bool, is_causal: int, window: int, has_sinks: bool
) -> None:
    """Over caches that are NaN wherever no sequence has a row."""
    made = form(Precision.FLOAT16, is_paged=is_paged, is_fp8=is_fp8)
    lengths = np.array([start + ROWS for start in STARTS], np.int32)
    held = {name: np.full_like(cache, np.nan) for name, cache in caches(made).items()}
    for b, length in enumerate(lengths):
        for position in range(length):
            at = place(made, b, position)
            for name, cache in caches(made).items():
                held[name][at] = cache[at]
    q = random(4, BATCH, HEADS, ROWS, HEAD_DIM).astype(np.float16)
    sinks = np.full(HEADS, -np.inf, np.float32) if not has_sinks else random(8, HEADS)
    feeds = {"q": q, **held, "key_value_lengths": lengths, "sinks": sinks}
    function = block_attention_function(made)
    (got,) = run_function(function, feeds | operands(made), is_causal=is_causal, window=window)
    k, v = (
        np.array([[held[name][place(made, b, j)] for j in range(LENGTH)] for b in range(BATCH)])
        for name in held
    )
    scales = SCALES.astype(float) if is_fp8 else np.ones(2)
    k, v = (
        one.astype(float).swapaxes(1, 2) * scale for one, scale in zip((k, v), scales, strict=True)
    )
    position, key = np.add.outer(STARTS, np.arange(ROWS))[..., None], np.arange(LENGTH)
    seen = np.broadcast_to(key < lengths[:, None, None], (BATCH, ROWS, LENGTH))
    if is_causal:
        seen = seen & (key <= position)
    if window:
        seen = seen & (np.abs(position - key) < window)
    np.testing.assert_allclose(got, attend(q, k, v, seen, sinks), rtol=2e-3, atol=2e-3)

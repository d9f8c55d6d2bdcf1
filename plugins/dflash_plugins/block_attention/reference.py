"""`block_attention` in float64, one query row at a time over an explicit list of its keys.

It also bounds the error of an attention with float32 sums, from the length and size of each sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_plugins.block_attention.cases import AttentionShape
from dflash_plugins.testing.numeric import Array, epsilon, relative, sum_error, tiny

EXPONENT_ROUNDINGS = 10
"""Roundings of a score between q k^T and exp: scale, base 2, minus the peak, merge of splits."""

FUNCTION_ROUNDINGS = 64
"""For two exponentials, a logarithm and a division, each right to two units in the last place:
four roundings that all err one way, which equals sixteen that err at random."""


@dataclass(frozen=True, slots=True)
class Roundings:
    """How often scores and weights are rounded to q's type; `unit` is the roundoff of the sums."""

    scores: int = 0
    weights: int = 1
    unit: float = epsilon(np.float32)


KERNEL = Roundings()
"""Scores stay in float32; weights are rounded to q's type for the product with v."""

TENSOR_CORES = Roundings(unit=2 * epsilon(np.float32))
"""Kernels on a GPU: tensor cores may truncate a sum instead of rounding it."""

BODY = Roundings(scores=2, weights=2)
"""ONNX Runtime stores scores, masked scores and weights in q's type; its sums are float32."""


def block_attention(
    inputs: Mapping[str, Array], *, is_causal: bool, window: int
) -> npt.NDArray[np.float64]:
    """softmax(q k^T) v over the keys that each row sees; attended [B,H_q,S,D].

    Args:
        inputs: q [B,H_q,S,D] pre-scaled by 1/sqrt(D); k_cache and v_cache [B,H_kv,M,D], or with
            page_table int [B,P] pools [pages,page_size,H_kv,D]; key_value_lengths int [B], which
            include the S query rows at the end; sinks [H_q], logits of a key whose value is 0,
            -inf for none; perhaps kv_scales [2], which multiply k and v.
        is_causal, window: row i of S is position p = length - S + i. It sees keys j < length with
            j <= p if causal and |p - j| < window if window is not 0; with no key the result is 0.
    """
    result = np.zeros(inputs["q"].shape, np.float64)
    for row in seen_rows(inputs, is_causal=is_causal, window=window):
        if row.scores.size:
            weights, _ = row.shares()
            result[row.at] = weights @ row.values
    return result


@dataclass(frozen=True, slots=True)
class Row:
    """One query row and the n keys that it may attend to, in float64.

    `at` is its (batch, head, row) in q; query [D]; keys and values [n,D], times their FP8 scales.
    """

    at: tuple[int, int, int]
    query: Array
    keys: Array
    values: Array
    sink: float
    scores: Array

    def shares(self) -> tuple[Array, float]:
        """The softmax weights of the keys [n] and of the sink; together they sum to 1."""
        peak = max(self.scores.max(), self.sink)
        weights, sink = np.exp(self.scores - peak), float(np.exp(self.sink - peak))
        total = weights.sum() + sink
        return weights / total, sink / total


def seen_rows(inputs: Mapping[str, Array], *, is_causal: bool, window: int) -> Iterator[Row]:
    """Each query row of a call of `block_attention` (arguments as there) with its keys."""
    q, sinks, page_table = inputs["q"], inputs["sinks"], inputs.get("page_table")
    k_scale, v_scale = map(float, inputs.get("kv_scales", (1, 1)))
    batch, q_heads, rows, _ = q.shape
    for b in range(batch):
        length = int(inputs["key_value_lengths"][b])
        table = None if page_table is None else page_table[b]
        k = k_scale * _held(inputs["k_cache"], b, length, table)
        v = v_scale * _held(inputs["v_cache"], b, length, table)
        group = q_heads // k.shape[0]
        positions = np.arange(length)
        for row in range(rows):
            position = length - rows + row
            seen = (positions <= position) if is_causal else positions < length
            if window:
                seen &= np.abs(position - positions) < window
            for h in range(q_heads):
                query = q[b, h, row].astype(np.float64)
                keys, values = k[h // group, seen], v[h // group, seen]
                yield Row((b, h, row), query, keys, values, float(sinks[h]), keys @ query)


def _held(cache: Array, sequence: int, length: int, table: Array | None) -> Array:
    """One sequence's cached rows [H_kv,length,D] in float64; `table` is its row of page_table."""
    if table is None:
        linear: Array = cache[sequence, :, :length].astype(np.float64)
        return linear
    page_size = cache.shape[1]
    pages: Array = cache[table[: -(-length // page_size)]].astype(np.float64)
    return pages.reshape(-1, *cache.shape[2:])[:length].swapaxes(0, 1)


def error_bound(
    shape: AttentionShape, inputs: dict[str, Array], expected: Array, how: Roundings = KERNEL
) -> Array:
    """Bounds the `relative_error` [B,H_q,S,D] of a correct attention.

    The result is o = sum(p_j v_j), p the softmax of the scores s_j = q k_j. Its errors come from

    - q k_j, a sum of D products. An error of a score is a relative error of its weight p_j;
    - the operations on a score before its exponential. Each errs by one rounding of the largest
      score; in the merge of splits, of the logarithm of the number of keys;
    - the sums over n keys, rescaled whenever the peak moves, at most once a key;
    - the roundings to q's type.

    A relative error of p_j moves o by p_j (v_j - o). The errors add up as in `sum_error`.
    """
    bound = np.zeros(expected.shape)
    for row in seen_rows(inputs, is_causal=shape.is_causal, window=shape.window):
        if row.scores.size:
            bound[row.at] = _row_bound(row, expected[row.at], shape.compute.numpy, how)
    return relative(bound, expected)


def _row_bound(row: Row, expected: Array, dtype: np.dtype[Any], how: Roundings) -> Array:
    count, size = row.keys.shape
    weights, sink = row.shares()
    largest = np.max(np.abs(row.scores), initial=0 if np.isinf(row.sink) else abs(row.sink))
    sums = 2 * count + FUNCTION_ROUNDINGS
    exponent = EXPONENT_ROUNDINGS * (largest + np.log(count + 1)) ** 2
    # In units of a rounding of the sums.
    narrow, least = epsilon(dtype) / how.unit, tiny(dtype) / how.unit
    # Squares of the relative error of each weight [n], then of the result [D].
    products = size * (row.keys**2 @ row.query**2)
    wrong = products + exponent + how.scores * (narrow * row.scores) ** 2
    squares, result = row.values**2, expected**2
    moved = (weights**2 * wrong) @ squares + (weights**2 @ wrong + sink**2 * exponent) * result
    added = sums * (weights**2 @ squares + result)
    stored = how.weights * ((narrow * weights) ** 2 + least**2) @ squares
    stray = sum_error(1, moved + added + stored, how.unit)
    bound: Array = stray + epsilon(dtype) * np.abs(expected)
    return bound

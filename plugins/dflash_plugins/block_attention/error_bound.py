"""How far off an attention may be that sums in float32, from the lengths and sizes of its sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_plugins.block_attention.cases import AttentionShape
from dflash_plugins.block_attention.reference import Row, seen_rows
from dflash_plugins.testing.numeric import Array, epsilon, relative, sum_error, tiny

EXPONENT_ROUNDINGS = 10
"""Of a score between q k^T and its exponential: scale, base 2, distance to the peak, shares."""

FUNCTION_ROUNDINGS = 64
"""Of two exponentials, a logarithm and a division, each right to two units in the last place: an
error of four roundings at once, which is that of sixteen that add up at random."""


@dataclass(frozen=True, slots=True)
class Roundings:
    """How often intermediate values are rounded to the type of q, besides the result.

    `unit` is the unit roundoff of the sums.
    """

    scores: int = 0
    weights: int = 1
    unit: float = epsilon(np.float32)


KERNEL = Roundings()
"""Scores stay in float32; weights take q's type, in which they are multiplied by v."""

TENSOR_CORES = Roundings(unit=2 * epsilon(np.float32))
"""Kernels on a GPU, whose tensor cores may cut a sum off where others round it."""

BODY = Roundings(scores=2, weights=2)
"""ONNX Runtime stores scores, masked scores and weights in q's type; its sums are float32."""


def error_bound(
    shape: AttentionShape, inputs: dict[str, Array], expected: Array, how: Roundings = KERNEL
) -> Array:
    """The largest `relative_error` [B,H_q,S,D] of an attention that does nothing wrong.

    The result is o = sum(p_j v_j), p the softmax of the scores s_j = q k_j. Its errors come from

    - q k_j, a sum of D products. A score's error is a relative error of its weight p_j;
    - what is done to a score before its exponential, each step an error of one rounding of the
      largest score, or of the logarithm of the number of keys where shares are joined;
    - the sums over n keys, rescaled whenever the peak moves, at most once a key;
    - the roundings to q's type.

    A relative error of p_j moves o by p_j (v_j - o). All of them add up as `sum_error` says.
    """
    bound = np.zeros(expected.shape)
    for row in seen_rows(inputs, is_causal=shape.is_causal, window=shape.window):
        if row.scores.size:
            bound[row.at] = _row_bound(row, expected[row.at], shape.compute.numpy, how)
    return relative(bound, expected)


def masked_error_bound(
    q: Array, k: Array, v: Array, seen: Array, expected: Array, sinks: Array | None = None
) -> Array:
    """`error_bound` of a body over any keys: k, v [B,H_kv,M,D], of which seen [B,S,M] are seen."""
    bound = np.zeros(expected.shape)
    group = q.shape[1] // k.shape[1]
    for b, h, s in np.ndindex(q.shape[:3]):
        query = q[b, h, s].astype(np.float64)
        keys, values = (part[b, h // group, seen[b, s]].astype(np.float64) for part in (k, v))
        sink = -np.inf if sinks is None else float(sinks[h])
        row = Row((b, h, s), query, keys, values, sink, keys @ query)
        if row.scores.size:
            bound[row.at] = _row_bound(row, expected[row.at], q.dtype, BODY)
    return relative(bound, expected)


def _row_bound(row: Row, expected: Array, dtype: np.dtype[Any], how: Roundings) -> Array:
    count, size = row.keys.shape
    weights, sink = row.shares()
    largest = np.max(np.abs(row.scores), initial=0 if np.isinf(row.sink) else abs(row.sink))
    sums = 2 * count + FUNCTION_ROUNDINGS
    exponent = EXPONENT_ROUNDINGS * (largest + np.log(count + 1)) ** 2
    narrow = epsilon(dtype) / how.unit  # in units of a rounding of the sums
    # Squares of the relative error of each weight [n], then of the result [D].
    products = size * (row.keys**2 @ row.query**2)
    wrong = products + exponent + how.scores * (narrow * row.scores) ** 2
    squares, result = row.values**2, expected**2
    moved = (weights**2 * wrong) @ squares + (weights**2 @ wrong + sink**2 * exponent) * result
    added = sums * (weights**2 @ squares + result)
    least = tiny(dtype) / how.unit
    stored = how.weights * ((narrow * weights) ** 2 + least**2) @ squares
    stray = sum_error(1, moved + added + stored, how.unit)
    bound: Array = stray + epsilon(dtype) * np.abs(expected)
    return bound

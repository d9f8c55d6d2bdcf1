"""`block_attention` in float64, from its definition: explicit keys, one row at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def block_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    key_value_lengths: Array,
    sinks: Array,
    *,
    is_causal: bool = False,
    window: int | None = None,
    page_table: Array | None = None,
    kv_scales: Array | None = None,
) -> npt.NDArray[np.float64]:
    """softmax(q k^T) v over the keys that each row sees; attended [B,H_q,S,D].

    q [B,H_q,S,D] pre-scaled by 1/sqrt(D). Caches [B,H_kv,M,D], or with page_table int [B,P]
    pools [pages,page_size,H_kv,D]. key_value_lengths int [B] counts the block's own S rows, which
    are the last. Row i of S stands at position p = length - S + i and sees keys j < length with
    j <= p if causal and |p - j| < window if windowed. kv_scales [2] multiplies k and v; sinks
    [H_q] are logits of a key whose value is 0; -inf is none. A row that sees no key is 0.
    """
    result = np.zeros(q.shape, np.float64)
    tensors = (q, k_cache, v_cache, key_value_lengths, sinks)
    for row in seen_rows(
        *tensors, is_causal=is_causal, window=window, page_table=page_table, kv_scales=kv_scales
    ):
        if row.scores.size:
            weights, _ = row.shares()
            result[row.at] = weights @ row.values
    return result


@dataclass(frozen=True, slots=True)
class Row:
    """One query row and the n keys that it sees, in float64.

    `at` is its index in q; query [D] and keys [n,D] with k's scale in them; values [n,D].
    """

    at: tuple[int, int, int]
    query: Array
    keys: Array
    values: Array
    sink: float
    scores: Array

    def shares(self) -> tuple[Array, float]:
        """What each key [n] and the sink have of the softmax; together 1."""
        peak = max(self.scores.max(), self.sink)
        weights, sink = np.exp(self.scores - peak), float(np.exp(self.sink - peak))
        total = weights.sum() + sink
        return weights / total, sink / total


def seen_rows(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    key_value_lengths: Array,
    sinks: Array,
    *,
    is_causal: bool = False,
    window: int | None = None,
    page_table: Array | None = None,
    kv_scales: Array | None = None,
) -> Iterator[Row]:
    """Each query row of a call of `block_attention`, with what it sees."""
    batch, q_heads, rows, _ = q.shape
    k_scale, v_scale = (1.0, 1.0) if kv_scales is None else map(float, kv_scales)
    for b in range(batch):
        length = int(key_value_lengths[b])
        table = None if page_table is None else page_table[b]
        k = k_scale * _held(k_cache, b, length, table)
        v = v_scale * _held(v_cache, b, length, table)
        group = q_heads // k.shape[0]
        positions = np.arange(length)
        for row in range(rows):
            position = length - rows + row
            seen = (positions <= position) if is_causal else positions < length
            if window is not None:
                seen &= np.abs(position - positions) < window
            for h in range(q_heads):
                query = q[b, h, row].astype(np.float64)
                keys, values = k[h // group, seen], v[h // group, seen]
                yield Row((b, h, row), query, keys, values, float(sinks[h]), keys @ query)


def _held(cache: Array, sequence: int, length: int, table: Array | None) -> Array:
    """The `length` rows [H_kv,length,D] of float64 that one sequence holds."""
    if table is None:
        linear: Array = cache[sequence, :, :length].astype(np.float64)
        return linear
    page_size = cache.shape[1]
    pages: Array = cache[table[: -(-length // page_size)]].astype(np.float64)
    return pages.reshape(-1, *cache.shape[2:])[:length].swapaxes(0, 1)

"""`block_attention` in float64, from its definition: explicit keys, one row at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def block_attention(
    inputs: Mapping[str, Array], *, is_causal: bool, window: int
) -> npt.NDArray[np.float64]:
    """softmax(q k^T) v over the keys that each row sees; attended [B,H_q,S,D].

    Args:
        inputs: q [B,H_q,S,D] pre-scaled by 1/sqrt(D); k_cache and v_cache [B,H_kv,M,D], or with
            page_table int [B,P] pools [pages,page_size,H_kv,D]; key_value_lengths int [B], which
            count the block's own S rows, the last; sinks [H_q], logits of a key whose value is 0,
            -inf for none; perhaps kv_scales [2], which multiply k and v.
        is_causal, window: row i of S stands at p = length - S + i and sees keys j < length with
            j <= p if causal and |p - j| < window if that is not 0. A row that sees no key is 0.
    """
    result = np.zeros(inputs["q"].shape, np.float64)
    for row in seen_rows(inputs, is_causal=is_causal, window=window):
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


def seen_rows(inputs: Mapping[str, Array], *, is_causal: bool, window: int) -> Iterator[Row]:
    """Each query row of a call of `block_attention`, with what it sees."""
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
    """The `length` rows [H_kv,length,D] of float64 that one sequence holds."""
    if table is None:
        linear: Array = cache[sequence, :, :length].astype(np.float64)
        return linear
    page_size = cache.shape[1]
    pages: Array = cache[table[: -(-length // page_size)]].astype(np.float64)
    return pages.reshape(-1, *cache.shape[2:])[:length].swapaxes(0, 1)

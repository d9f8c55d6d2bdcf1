"""`block_attention` in float64, from its definition: explicit keys, one row at a time."""

from __future__ import annotations

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
    batch, q_heads, rows, _ = q.shape
    k_scale, v_scale = (1.0, 1.0) if kv_scales is None else map(float, kv_scales)
    for b in range(batch):
        length = int(key_value_lengths[b])
        table = None if page_table is None else page_table[b]
        k, v = (_held(cache, b, length, table) for cache in (k_cache, v_cache))
        group = q_heads // k.shape[0]
        keys = np.arange(length)
        for row in range(rows):
            position = length - rows + row
            seen = (keys <= position) if is_causal else keys < length
            if window is not None:
                seen &= np.abs(position - keys) < window
            for h in range(q_heads):
                scores = k_scale * (k[h // group, seen] @ q[b, h, row].astype(np.float64))
                if not scores.size:
                    continue
                peak = max(scores.max(), sinks[h])
                weights = np.exp(scores - peak)
                total = weights.sum() + np.exp(sinks[h] - peak)
                result[b, h, row] = v_scale * (weights / total @ v[h // group, seen])
    return result


def _held(cache: Array, sequence: int, length: int, table: Array | None) -> Array:
    """The `length` rows [H_kv,length,D] of float64 that one sequence holds."""
    if table is None:
        linear: Array = cache[sequence, :, :length].astype(np.float64)
        return linear
    page_size = cache.shape[1]
    pages: Array = cache[table[: -(-length // page_size)]].astype(np.float64)
    return pages.reshape(-1, *cache.shape[2:])[:length].swapaxes(0, 1)

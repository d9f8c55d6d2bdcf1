"""Attention's loop over tiles of K and V, as small as it can be, to try the compiler on."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attention_loop(
    q,  # [ROWS,HEAD_DIM]
    k_cache,  # [length,HEAD_DIM]
    v_cache,
    length,
    attended,  # float32 [ROWS,HEAD_DIM], not divided by the sum of weights
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    AHEAD: tl.constexpr,  # the scores of a tile are asked for before the softmax of the last
    SPECIALIZED: tl.constexpr,  # the compiler may give the phases to warps of their own
    MASKED: tl.constexpr,
):
    d = tl.arange(0, HEAD_DIM)
    tile = tl.arange(0, TILE)
    offsets = tl.arange(0, ROWS)[:, None] * HEAD_DIM + d[None, :]
    q_rows = tl.load(q + offsets)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    if AHEAD:
        k = tl.load(k_cache + tile[:, None] * HEAD_DIM + d[None, :])
        ahead = tl.dot(q_rows, tl.trans(k))
    for index in tl.range(0, length // TILE, warp_specialize=SPECIALIZED):
        keys = index * TILE + tile
        if AHEAD:
            scores = ahead
            k = tl.load(k_cache + (keys + TILE)[:, None] * HEAD_DIM + d[None, :])
            ahead = tl.dot(q_rows, tl.trans(k))
        else:
            k = tl.load(k_cache + keys[:, None] * HEAD_DIM + d[None, :])
            scores = tl.dot(q_rows, tl.trans(k))
        if MASKED:
            scores = tl.where((keys < length)[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        acc = acc * tl.exp2(peak - new_peak)[:, None]
        v = tl.load(v_cache + keys[:, None] * HEAD_DIM + d[None, :])
        acc = tl.dot(weights.to(q_rows.dtype), v, acc=acc)
        peak = new_peak
    tl.store(attended + offsets, acc)

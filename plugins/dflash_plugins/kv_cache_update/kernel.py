"""Writes one layer's K and V rows into its KV cache, in one launch.

Program (t, g) handles row t of the B·S rows and HEADS KV heads from g·HEADS on. A head's row is D
contiguous elements in the input and in every cache layout. For D of 64, 128 and 256 that is whole
32-byte sectors, so loads and stores are coalesced for a single row as for a prefill chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_plugins.kv_feature_injection.kernel import cache_rows, to_e4m3_range


@triton.jit
def kv_cache_update(
    k,  # [B,H_kv,S,D]
    v,  # [B,H_kv,S,D]
    positions,  # [B,S] int64
    page_table,  # int32 [B,columns], or None
    k_cache,  # linear [B,H_kv,M,D], paged [pages,page_size,H_kv,D]; same memory as k_cache_out
    v_cache,
    kv_scales,  # float32 [2], of K and V, or None
    rows,  # S
    limit,  # linear: M; paged: columns
    pages,  # of a paged cache
    k_cache_out,
    v_cache_out,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    D_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence = row // rows
    position = tl.load(positions + row)

    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, D_BLOCK)
    inside = (d < HEAD_DIM)[None, :] & (head < KV_HEADS)[:, None]
    first, is_held = cache_rows(
        sequence, position, head, page_table, limit, pages, KV_HEADS, PAGE_SIZE
    )
    inside = inside & is_held
    source = (((sequence * KV_HEADS + head) * rows + row % rows) * HEAD_DIM)[:, None] + d[None, :]
    target = (first * HEAD_DIM)[:, None] + d[None, :]

    k_rows = tl.load(k + source, mask=inside, other=0.0)
    v_rows = tl.load(v + source, mask=inside, other=0.0)
    if kv_scales is not None:
        k_rows = to_e4m3_range(k_rows.to(tl.float32), tl.load(kv_scales))
        v_rows = to_e4m3_range(v_rows.to(tl.float32), tl.load(kv_scales + 1))
    stored = k_cache_out.dtype.element_ty
    tl.store(k_cache_out + target, k_rows.to(stored), mask=inside)
    tl.store(v_cache_out + target, v_rows.to(stored), mask=inside)

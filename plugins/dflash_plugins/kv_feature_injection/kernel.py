"""k_norm and RoPE of K, and the write of K and V into a draft layer's KV cache, in one launch.

Program (t, g) handles row t of the B·S rows and HEADS KV heads from g·HEADS on. The norm is
computed in float32 and rounded to the input's type before RoPE, as in the graph function.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def kv_feature_injection(
    k,  # [B,S,H_kv,D]
    v,  # [B,S,H_kv,D]
    k_norm,  # [D] float32
    cos,  # [P,D/2]
    sin,  # [P,D/2]
    positions,  # [B,S] int64
    page_table,  # int32 [B,columns], or None
    k_cache,  # linear [B,H_kv,M,D], paged [pages,page_size,H_kv,D]; same memory as k_cache_out
    v_cache,
    kv_scales,  # float32 [2], of K and V, or None
    rows,  # S
    limit,  # linear: M; paged: columns
    pages,  # of a paged cache
    angles,  # P
    k_cache_out,
    v_cache_out,
    EPSILON: tl.constexpr,
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
    half = tl.arange(0, D_BLOCK // 2)
    HALF: tl.constexpr = HEAD_DIM // 2
    inside = (half < HALF)[None, :] & (head < KV_HEADS)[:, None]
    slot = position
    if PAGE_SIZE == 0:  # as ONNX's TensorScatter: rows follow the first one's position
        slot = tl.load(positions + sequence * rows) + row % rows
    first, is_held = cache_rows(sequence, slot, head, page_table, limit, pages, KV_HEADS, PAGE_SIZE)
    inside = inside & is_held
    source = ((row * KV_HEADS + head) * HEAD_DIM)[:, None] + half[None, :]
    target = (first * HEAD_DIM)[:, None] + half[None, :]

    near = tl.load(k + source, mask=inside, other=0.0).to(tl.float32)
    far = tl.load(k + source + HALF, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(near * near + far * far, axis=1)
    inverse = tl.rsqrt(squares / HEAD_DIM + EPSILON)[:, None]
    weight_near = tl.load(k_norm + half, mask=half < HALF, other=0.0)[None, :]
    weight_far = tl.load(k_norm + HALF + half, mask=half < HALF, other=0.0)[None, :]
    narrow = k.dtype.element_ty
    near = (near * inverse * weight_near).to(narrow).to(tl.float32)
    far = (far * inverse * weight_far).to(narrow).to(tl.float32)

    angle = position * HALF + half[None, :]
    is_turned = inside & (position >= 0) & (position < angles)
    cosine = tl.load(cos + angle, mask=is_turned, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, mask=is_turned, other=0.0).to(tl.float32)
    rotated_near = near * cosine - far * sine
    rotated_far = far * cosine + near * sine

    v_near = tl.load(v + source, mask=inside, other=0.0).to(tl.float32)
    v_far = tl.load(v + source + HALF, mask=inside, other=0.0).to(tl.float32)
    if kv_scales is not None:
        k_scale, v_scale = tl.load(kv_scales), tl.load(kv_scales + 1)
        # As in the graph function: k is rounded to the input's type before it is quantised.
        rotated_near = to_e4m3_range(rotated_near.to(narrow).to(tl.float32), k_scale)
        rotated_far = to_e4m3_range(rotated_far.to(narrow).to(tl.float32), k_scale)
        v_near = to_e4m3_range(v_near, v_scale)
        v_far = to_e4m3_range(v_far, v_scale)
    stored = k_cache_out.dtype.element_ty
    tl.store(k_cache_out + target, rotated_near.to(stored), mask=inside)
    tl.store(k_cache_out + target + HALF, rotated_far.to(stored), mask=inside)
    tl.store(v_cache_out + target, v_near.to(stored), mask=inside)
    tl.store(v_cache_out + target + HALF, v_far.to(stored), mask=inside)


@triton.jit
def cache_rows(
    sequence, slot, head, page_table, limit, pages, KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr
):
    """Index of the row of D elements for position `slot` of each head; False if there is none.

    Positions outside of the cache or the page table, and pages outside of the pool, have no row:
    -1 is a row's that is not kept, and TensorRT times kernels over arbitrary numbers.
    """
    if PAGE_SIZE == 0:
        is_held = (slot >= 0) & (slot < limit)
        row = (sequence * KV_HEADS + head) * limit + slot
    else:
        column = slot // PAGE_SIZE
        is_listed = (slot >= 0) & (column < limit)
        entry = page_table + sequence * limit + column
        page = tl.load(entry, mask=is_listed, other=-1).to(tl.int64)
        is_held = (page >= 0) & (page < pages)
        row = (page * PAGE_SIZE + slot % PAGE_SIZE) * KV_HEADS + head
    return row, is_held


@triton.jit
def to_e4m3_range(values, scale):
    """values / scale, clipped to the range of E4M3; NaN stays (quantization/codecs.py)."""
    scaled = tl.div_rn(values, scale + tl.zeros_like(values))
    return tl.clamp(scaled, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)

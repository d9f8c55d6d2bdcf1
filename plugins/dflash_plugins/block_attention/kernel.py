"""`block_attention`: S query rows per sequence over the KV cache, and the merge of its splits.

Long caches are split over the context as in flash-decoding. A share is one split's part: its cache
positions, and the attention over them (docs/tensorrt.md). q is pre-scaled by
1/sqrt(D), as for `trt::TRT_Attention`. Products run in q's type with float32 sums; a narrower
cache (bfloat16, FP8) is converted to it first.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_range(split, first, end, splits, RUN: tl.constexpr, TILE: tl.constexpr):
    """The half-open range of tile numbers of `split` that hold any of the positions [first, end).

    Runs of RUN positions, each cut into tiles, go to the splits in turn.
    """
    run_tiles: tl.constexpr = RUN // TILE
    turn, before = splits * run_tiles, split * run_tiles
    first_tile, end_tile = first // TILE, tl.cdiv(end, TILE)
    begin = first_tile // turn * run_tiles
    begin += tl.minimum(tl.maximum(first_tile % turn - before, 0), run_tiles)
    stop = end_tile // turn * run_tiles
    return begin, stop + tl.minimum(tl.maximum(end_tile % turn - before, 0), run_tiles)


@triton.jit
def tile_position(split, index, splits, RUN: tl.constexpr, TILE: tl.constexpr):
    """The first cache position of the tile with number `index` of `split`."""
    run_tiles: tl.constexpr = RUN // TILE
    return (index // run_tiles * splits + split) * RUN + index % run_tiles * TILE


@triton.jit
def visible_range(nearest, furthest, length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Positions [first, end) that rows at `nearest` … `furthest` may see; WINDOW 0 is no window."""
    first = nearest * 0
    if WINDOW > 0:
        first = tl.maximum(nearest - WINDOW + 1, 0)
    if CAUSAL:
        return first, tl.minimum(length, furthest + 1)
    if WINDOW > 0:
        return first, tl.minimum(length, furthest + WINDOW)
    return first, length


@triton.jit
def block_attention(
    q,  # [B,H_q,S,D], pre-scaled
    k_cache,  # linear [B,H_kv,capacity,D], paged [pages,page_size,H_kv,D]
    v_cache,
    key_value_lengths,  # int32 [B]: cached positions, of which the last S are the query rows' own
    page_table,  # int32 [B,max_pages], or None; capacity is max_pages · page_size
    kv_scales,  # float32 [2] of K and V, or None
    sinks,  # float32 [H_q], attention-sink logits (-inf: none); None where the merge adds them
    rows,  # S
    capacity,  # positions that a sequence's cache can hold
    pages,  # of a paged cache
    splits,  # how many splits a row has; 1 where `attended` is written at once
    attended,  # [B,H_q,S,D], the result; or None, and the next two instead
    shares,  # float32 [R,D], its beginning as [splits,B,H_q,S,D]: attention over a split's keys
    log_sums,  # float32 [R], alike: log2 of the sum of exp(score) over the split's keys
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """One split of BLOCK_M query rows of a KV head's GQA group.

    Grid (splits · row blocks, H_kv, B). A split without positions for these rows writes nothing.
    """
    split = tl.program_id(0) % splits
    first_m = tl.program_id(0) // splits * BLOCK_M
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    kv_heads = tl.num_programs(1)

    length = tl.load(key_value_lengths + sequence)
    start = length - rows
    last_m = tl.minimum(first_m + BLOCK_M, GROUP * rows) - 1
    is_one_head = first_m // rows == last_m // rows
    nearest = start + tl.where(is_one_head, first_m % rows, 0)
    furthest = start + tl.where(is_one_head, last_m % rows, rows - 1)
    first, end = visible_range(nearest, furthest, tl.minimum(length, capacity), CAUSAL, WINDOW)
    begin, stop = tile_range(split, first, end, splits, RUN, TILE)
    if (shares is not None) and (begin >= stop):
        return

    m = first_m + tl.arange(0, BLOCK_M)
    is_row = m < GROUP * rows
    position = (start + m % rows)[:, None]
    d = tl.arange(0, HEAD_DIM)
    head = (sequence * kv_heads + kv_head).to(tl.int64)
    q_offsets = (head * GROUP * rows + m)[:, None] * HEAD_DIM + d[None, :]
    q_rows = tl.load(q + q_offsets, mask=is_row[:, None], other=0.0)
    # Rows of a cache fit 32 bits, and so do the elements of one head; those of a cache may not.
    if PAGE_SIZE == 0:
        k_cache += head * capacity * HEAD_DIM
        v_cache += head * capacity * HEAD_DIM

    score_scale = LOG2_E
    if kv_scales is not None:
        score_scale = tl.load(kv_scales) * LOG2_E
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for index in tl.range(begin, stop):
        keys = tile_position(split, index, splits, RUN, TILE) + tl.arange(0, TILE)
        # Positions outside may hold NaN (unwritten, or on a freed page), and 0 times NaN is NaN.
        is_held = (keys >= first) & (keys < end)
        if PAGE_SIZE > 0:
            entry = page_table + sequence * (capacity // PAGE_SIZE) + keys // PAGE_SIZE
            # TensorRT times kernels over arbitrary numbers: such a page must be in the pool, too.
            page = tl.minimum(tl.maximum(tl.load(entry, mask=is_held, other=0), 0), pages - 1)
            row = (page * PAGE_SIZE + keys % PAGE_SIZE) * kv_heads + kv_head
            kv_offsets = row.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
        else:
            kv_offsets = keys[:, None] * HEAD_DIM + d[None, :]
        k = tl.load(k_cache + kv_offsets, mask=is_held[:, None], other=0.0)
        scores = tl.dot(q_rows, tl.trans(k.to(q_rows.dtype)), input_precision="ieee")
        is_seen = is_held[None, :]
        if CAUSAL:
            is_seen = is_seen & (keys[None, :] <= position)
        if WINDOW > 0:
            is_seen = is_seen & (keys[None, :] > position - WINDOW)
            if not CAUSAL:
                is_seen = is_seen & (keys[None, :] < position + WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * score_scale)
        # Before a row's first key the peak is -inf, and -inf minus -inf is NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores * score_scale - shift[:, None])
        fade = tl.exp2(peak - shift)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(v_cache + kv_offsets, mask=is_held[:, None], other=0.0)
        acc = acc * fade[:, None]
        p = weights.to(q_rows.dtype)
        acc = tl.dot(p, v.to(q_rows.dtype), acc=acc, input_precision="ieee")
        peak = new_peak

    if kv_scales is not None:
        acc = acc * tl.load(kv_scales + 1)
    if shares is None:
        q_head = kv_head * GROUP + m // rows
        sink = tl.load(sinks + q_head, mask=is_row, other=0.0) * LOG2_E
        new_peak = tl.maximum(peak, sink)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        fade = tl.exp2(peak - shift)
        total = total * fade + tl.exp2(sink - shift)
        acc = acc * fade[:, None]
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(attended + q_offsets, result, mask=is_row[:, None])
    else:
        has_keys = total > 0.0
        divisor = tl.where(has_keys, total, 1.0)
        log_sum = tl.where(has_keys, peak + tl.log2(divisor), float("-inf"))
        part = (split * tl.num_programs(2) + sequence).to(tl.int64) * kv_heads + kv_head
        own_sums = log_sums + part * GROUP * rows
        tl.store(own_sums + m, log_sum, mask=is_row)
        own_shares = shares + part * GROUP * rows * HEAD_DIM + m[:, None] * HEAD_DIM + d[None, :]
        tl.store(own_shares, acc / divisor[:, None], mask=is_row[:, None])


@triton.jit
def block_attention_merge(
    q,  # [B,H_q,S,D]: not read; `attended` has its type and shape
    shares,  # float32 [R,D], from block_attention
    log_sums,  # float32 [R], from block_attention
    key_value_lengths,
    sinks,
    rows,  # S
    splits,
    attended,  # [B,H_q,S,D]
    HEAD_DIM: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    RUN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Combines one row's splits; grid (S, H_q, B).

    Splits without positions for the row are skipped, as they may be unwritten.
    """
    row = tl.program_id(0)
    q_head = tl.program_id(1)
    sequence = tl.program_id(2)
    length = tl.load(key_value_lengths + sequence)
    split = tl.arange(0, MOST_SPLITS)
    position = length - rows + row
    first, end = visible_range(position, position, length, CAUSAL, WINDOW)
    begin, stop = tile_range(split, first, end, splits, RUN, RUN)
    is_active = (begin < stop) & (split < splits)

    head = sequence * tl.num_programs(1) + q_head
    heads = tl.num_programs(2) * tl.num_programs(1)
    share_row = (split * heads + head).to(tl.int64) * rows + row
    log_sum = tl.load(log_sums + share_row, mask=is_active, other=float("-inf"))
    sink = tl.load(sinks + q_head) * LOG2_E
    peak = tl.maximum(tl.max(log_sum, 0), sink)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(log_sum - shift)
    total = tl.sum(weights, 0) + tl.exp2(sink - shift)

    d = tl.arange(0, HEAD_DIM)
    offsets = share_row[:, None] * HEAD_DIM + d[None, :]
    share = tl.load(shares + offsets, mask=is_active[:, None], other=0.0)
    result = tl.sum(share * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(attended + (head.to(tl.int64) * rows + row) * HEAD_DIM + d, result)

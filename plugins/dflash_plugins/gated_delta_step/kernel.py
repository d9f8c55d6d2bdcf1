"""The recurrence of a Gated DeltaNet layer, with the replay of what earlier calls left to it.

A program has COLUMNS columns of one value head's state: it runs the rows from `state_start` on,
stores them where the next call's replay may begin, and goes on to the call's last row
(docs/design/recurrent-state.md). Rows are counted from `start`, so those before the call are
negative. Arithmetic is float32. Row by row, with the state in registers, a row's is the same
however a text is cut into calls; by chunks of rows (`chunks.py`) it rounds otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_plugins.gated_delta_step.chunks import run_chunk
from dflash_plugins.gated_delta_step.rows import gates, locate, read, silu, taps


@triton.jit
def gated_delta_step(
    new_rows,  # [B,S,C+2N]: raw q, k and v, then b and a of every value head
    kernel,  # float32 [C,1,TAPS]; the last tap is the row's own
    time_bias,  # float32 [N]
    decay,  # float32 [N]: -exp(A_log)
    rows,  # [B,2,HELD,C+2N]: of one side, the raw rows before `rows_end`
    state,  # float32 [B,N,D,D]: after the rows before `state_start`
    start,  # int64 [B]
    state_start,  # int64 [B]
    rows_end,  # int64 [B]; below 0 where a sequence is idle, and keeps what it has
    side,  # int64 [B]: which of both to read
    count,  # S
    y,  # [B,S,N·D]
    state_out,  # is `state`: after the rows before max(start, start + S - REPLAY)
    rows_out,  # is `rows`: of the other side, which nobody reads, the raw rows before start + S
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TAPS: tl.constexpr,  # 4 at most
    HELD: tl.constexpr,
    REPLAY: tl.constexpr,
    HELD_BLOCK: tl.constexpr,  # HELD, up to a power of two
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,  # rows at a time, REPLAY at least; 1 goes row by row
    SLICE: tl.constexpr,  # rows of a state that are multiplied at a time, for chunks
    UPDATED: tl.constexpr,  # and that are updated
):
    """Grid (VALUE_HEADS · HEAD_DIM / COLUMNS, B)."""
    CHANNELS: tl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * HEAD_DIM
    WIDTH: tl.constexpr = CHANNELS + 2 * VALUE_HEADS
    OUTPUTS: tl.constexpr = VALUE_HEADS * HEAD_DIM
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    PARTS: tl.constexpr = HEAD_DIM // COLUMNS
    head = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    sequence = tl.program_id(1).to(tl.int64)
    end = tl.load(rows_end + sequence)
    # An idle sequence runs as a fresh one, of which nothing is stored but outputs.
    is_live = end >= 0
    first = tl.where(is_live, tl.load(start + sequence), 0)
    settled = tl.where(is_live, tl.load(state_start + sequence), 0)
    own_side = sequence * 2 + (tl.load(side + sequence) & 1)  # TensorRT times arbitrary numbers
    oldest = -tl.minimum(first, HELD).to(tl.int32)
    shift = HELD + (first - tl.maximum(end, 0)).to(tl.int32)
    begin = -tl.minimum(tl.maximum(first - settled, 0), REPLAY).to(tl.int32)
    cut = tl.maximum(count - REPLAY, 0)
    old = rows + own_side * HELD * WIDTH
    new = new_rows + sequence * count * WIDTH

    d = tl.arange(0, HEAD_DIM)
    own = part * COLUMNS + tl.arange(0, COLUMNS)
    q_first = head // GROUP * HEAD_DIM
    k_first = KEY_HEADS * HEAD_DIM + q_first
    v_channel = (2 * KEY_HEADS + head) * HEAD_DIM + own
    b_channel = CHANNELS + head
    a_channel = b_channel + VALUE_HEADS
    bias = tl.load(time_bias + head)
    slope = tl.load(decay + head)
    own_state = (sequence * VALUE_HEADS + head) * HEAD_DIM * HEAD_DIM
    outputs = y + sequence * count * OUTPUTS + head * HEAD_DIM + own

    # The next call's old rows: every element of them is one program's.
    slot = tl.arange(0, HELD_BLOCK)[:, None]
    is_held = (slot < HELD) & is_live
    at = rows_out + ((own_side ^ 1) * HELD + slot) * WIDTH
    h, g, is_old, is_new = locate(new, old, count - HELD + slot, oldest, shift, count, WIDTH, HELD)
    column = v_channel[None, :]
    tl.store(at + column, read(h, g, is_old, is_new, column), mask=is_held)
    if head % GROUP == 0:
        q_column = (q_first + own)[None, :]
        tl.store(at + q_column, read(h, g, is_old, is_new, q_column), mask=is_held)
        k_column = (k_first + own)[None, :]
        tl.store(at + k_column, read(h, g, is_old, is_new, k_column), mask=is_held)
    if part == 0:
        gate = (b_channel + tl.arange(0, 2) * VALUE_HEADS)[None, :]
        tl.store(at + gate, read(h, g, is_old, is_new, gate), mask=is_held)

    # A slot that begins anew has what its last sequence left.
    if CHUNK > 1:
        before_chunk = state + own_state
        is_begun = settled != 0
        # A chunk ends where the next call's replay may begin. One settles even if it has no rows:
        # it stores what a slot begins with.
        settling = tl.maximum(tl.cdiv(cut - begin, CHUNK), 1)
        chunks = settling + tl.cdiv(count - cut, CHUNK)
        for index in tl.range(0, chunks, disable_licm=True):
            is_open = index >= settling
            run_chunk(
                before_chunk,
                is_begun,
                state_out + own_state,
                is_live,
                tl.where(is_open, cut + (index - settling) * CHUNK, begin + index * CHUNK),
                tl.where(is_open, count, cut),
                index + 1 == chunks,
                new,
                old,
                kernel,
                y + sequence * count * OUTPUTS + head * HEAD_DIM,
                oldest,
                shift,
                slope,
                bias,
                own,
                q_first,
                k_first,
                (2 * KEY_HEADS + head) * HEAD_DIM,
                b_channel,
                a_channel,
                WIDTH,
                HELD,
                TAPS,
                CHUNK,
                SLICE,
                UPDATED,
                HEAD_DIM,
                OUTPUTS,
            )
            # Other threads read what these have stored. Of an idle sequence nothing is: after the
            # rows that settle its outputs are nobody's.
            tl.debug_barrier()
            is_begun = is_live
    else:
        places = own_state + d[:, None] * HEAD_DIM + own[None, :]
        memory = tl.load(state + places, mask=settled != 0, other=0.0)
        # q and k lie HEAD_DIM · KEY_HEADS apart, and are taken together.
        is_k = tl.arange(0, 2)[:, None]
        channel = q_first + is_k * (KEY_HEADS * HEAD_DIM) + d[None, :]
        w0, w1, w2, w3 = taps(kernel, channel, TAPS)
        u0, u1, u2, u3 = taps(kernel, v_channel, TAPS)
        # Rows that no tap reaches may be anything, and 0 times NaN is NaN.
        h, g, is_old, is_new = locate(new, old, begin - 1, oldest, shift, count, WIDTH, HELD)
        is_old = is_old & (TAPS > 1)
        x1 = read(h, g, is_old, is_new, channel)
        v1 = read(h, g, is_old, is_new, v_channel)
        h, g, is_old, is_new = locate(new, old, begin - 2, oldest, shift, count, WIDTH, HELD)
        is_old = is_old & (TAPS > 2)
        x2 = read(h, g, is_old, is_new, channel)
        v2 = read(h, g, is_old, is_new, v_channel)
        h, g, is_old, is_new = locate(new, old, begin - 3, oldest, shift, count, WIDTH, HELD)
        is_old = is_old & (TAPS > 3)
        x3 = read(h, g, is_old, is_new, channel)
        v3 = read(h, g, is_old, is_new, v_channel)
        scale = tl.where(is_k == 0, HEAD_DIM**-0.5, 1.0)
        for row in tl.range(begin, count):
            if row == cut:
                tl.store(state_out + places, memory, mask=is_live)
            h, g, is_old, is_new = locate(new, old, row, oldest, shift, count, WIDTH, HELD)
            x0 = read(h, g, is_old, is_new, channel)
            v0 = read(h, g, is_old, is_new, v_channel)
            b = read(h, g, is_old, is_new, b_channel)
            a = read(h, g, is_old, is_new, a_channel)
            beta, log_decay = gates(b, a, slope, bias)
            v = silu(v0 * u0 + v1 * u1 + v2 * u2 + v3 * u3)
            x = silu(x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3)
            x = x / tl.sqrt_rn(tl.sum(x * x, 1) + 1e-6)[:, None] * scale
            q = tl.sum(tl.where(is_k == 0, x, 0.0), 0)[:, None]
            k = tl.sum(tl.where(is_k == 0, 0.0, x), 0)[:, None]
            memory = memory * tl.exp(log_decay)
            change = (v - tl.sum(memory * k, 0)) * beta
            memory = memory + k * change[None, :]
            place = outputs + tl.maximum(row, 0).to(tl.int64) * OUTPUTS
            tl.store(place, tl.sum(memory * q, 0), mask=row >= 0)
            x3 = x2
            x2 = x1
            x1 = x0
            v3 = v2
            v2 = v1
            v1 = v0

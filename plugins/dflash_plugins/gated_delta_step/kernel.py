"""The recurrence of a Gated DeltaNet layer, with the replay of what earlier calls left to it.

A program has COLUMNS columns of one value head's state in registers: it reads them once, runs the
rows from `state_start` on, stores them where the next call's replay may begin, and goes on to the
call's last row (docs/design/recurrent-state.md). Rows are counted from `start`, so those before the
call are negative. Arithmetic is float32, and a row's is the same however a text is cut into calls.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate(new, old, row, oldest, shift, count, WIDTH: tl.constexpr, HELD: tl.constexpr):
    """Where raw rows begin: in `old` where they are before the call, in `new`; and which hold.

    Before `oldest`, the sequence's first row, and from `count` on there is nothing. `shift` is
    where in `old` the call's first row would lie.
    """
    slot = tl.minimum(tl.maximum(row + shift, 0), HELD - 1)
    given = new + tl.maximum(row, 0).to(tl.int64) * WIDTH
    return old + slot * WIDTH, given, (row >= oldest) & (row < 0), (row >= 0) & (row < count)


@triton.jit
def read(held, given, is_old, is_new, channel):
    """`channel` of what was located, as float32; 0 where there is nothing."""
    before = tl.load(held + channel, mask=is_old, other=0.0).to(tl.float32)
    now = tl.load(given + channel, mask=is_new, other=0.0).to(tl.float32)
    return tl.where(is_old, before, now)


@triton.jit
def silu(mixed):
    return mixed / (1.0 + tl.exp(-mixed))


@triton.jit
def taps(kernel, channel, TAPS: tl.constexpr):
    """The convolution's weights of a row and of the three before it; those it lacks are 0."""
    last = kernel + channel * TAPS + (TAPS - 1)
    return (
        tl.load(last),
        tl.load(last - 1, mask=TAPS > 1, other=0.0),
        tl.load(last - 2, mask=TAPS > 2, other=0.0),
        tl.load(last - 3, mask=TAPS > 3, other=0.0),
    )


@triton.jit
def gates(b, a, slope, bias):
    """beta, and the logarithm of the decay: slope · softplus(a + bias)."""
    x = a + bias
    small = tl.exp(-tl.abs(x))
    # log(1 + small) without that sum's rounding, in which a small one would vanish.
    whole = 1.0 + small
    lost = tl.where(whole == 1.0, 1.0, whole - 1.0)
    log1p = tl.where(whole == 1.0, small, tl.log(whole) * (small / lost))
    return 1.0 / (1.0 + tl.exp(-b)), slope * (tl.maximum(x, 0.0) + log1p)


@triton.jit
def gated_delta_step(
    new_rows,  # [B,S,C+2N]: raw q, k and v, then b and a of every value head
    kernel,  # float32 [C,1,TAPS]; the last tap is the row's own
    time_bias,  # float32 [N]
    decay,  # float32 [N]: -exp(A_log)
    rows,  # [B,HELD,C+2N]: the raw rows before `rows_end`
    state,  # float32 [B,N,D,D]: after the rows before `state_start`
    start,  # int64 [B]
    state_start,  # int64 [B]
    rows_end,  # int64 [B]
    count,  # S
    y,  # [B,S,N·D]
    state_out,  # is `state`: after the rows before max(start, start + S - REPLAY)
    rows_out,  # [B,HELD,C+2N]: the raw rows before start + S; not `rows`, which others still read
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TAPS: tl.constexpr,  # 4 at most
    HELD: tl.constexpr,
    HELD_BLOCK: tl.constexpr,  # HELD, up to a power of two
    COLUMNS: tl.constexpr,
):
    """Grid (VALUE_HEADS · HEAD_DIM / COLUMNS, B)."""
    REPLAY: tl.constexpr = HELD - TAPS + 1
    CHANNELS: tl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * HEAD_DIM
    WIDTH: tl.constexpr = CHANNELS + 2 * VALUE_HEADS
    OUTPUTS: tl.constexpr = VALUE_HEADS * HEAD_DIM
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    PARTS: tl.constexpr = HEAD_DIM // COLUMNS
    head = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    sequence = tl.program_id(1).to(tl.int64)
    first = tl.load(start + sequence)
    settled = tl.load(state_start + sequence)
    oldest = -tl.minimum(first, HELD).to(tl.int32)
    shift = HELD + (first - tl.load(rows_end + sequence)).to(tl.int32)
    begin = -tl.minimum(tl.maximum(first - settled, 0), REPLAY).to(tl.int32)
    cut = tl.maximum(count - REPLAY, 0)
    old = rows + sequence * HELD * WIDTH
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
    places = (sequence * VALUE_HEADS + head) * HEAD_DIM * HEAD_DIM
    places = places + d[:, None] * HEAD_DIM + own[None, :]
    outputs = y + sequence * count * OUTPUTS + head * HEAD_DIM + own
    # A slot that begins anew has what its last sequence left.
    memory = tl.load(state + places, mask=settled != 0, other=0.0)

    # q and k lie HEAD_DIM · KEY_HEADS apart, and are taken together.
    is_k = tl.arange(0, 2)[:, None]
    channel = q_first + is_k * (KEY_HEADS * HEAD_DIM) + d[None, :]
    w0, w1, w2, w3 = taps(kernel, channel, TAPS)
    u0, u1, u2, u3 = taps(kernel, v_channel, TAPS)
    h, g, is_old, is_new = locate(new, old, begin - 1, oldest, shift, count, WIDTH, HELD)
    x1 = read(h, g, is_old, is_new, channel)
    v1 = read(h, g, is_old, is_new, v_channel)
    # Rows that no tap reaches may be anything, and 0 times NaN is NaN.
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
            tl.store(state_out + places, memory)
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

    # The next call's old rows: every element of them is one program's.
    slot = tl.arange(0, HELD_BLOCK)[:, None]
    is_held = slot < HELD
    at = rows_out + (sequence * HELD + slot) * WIDTH
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

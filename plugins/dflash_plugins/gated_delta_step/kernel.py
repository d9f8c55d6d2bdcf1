"""The recurrence of a Gated DeltaNet layer, with the replay of what earlier calls left to it.

A program has COLUMNS columns of one value head's state in registers: it reads them once, runs the
rows from `state_start` on, stores them where the next call's replay may begin, and goes on to the
call's last row (docs/design/recurrent-state.md). Rows are counted from `start`, so those before the
call are negative. Arithmetic is float32. Row by row, a row's is the same however a text is cut into
calls; prompts may go by chunks of rows, which round otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

PRECISION = tl.constexpr("tf32x3")
"""Three products of TF32 have all but the last bits of a float32 product."""


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
def mix_rows(
    new,
    old,
    kernel,
    rows,
    oldest,
    shift,
    count,
    channel,
    WIDTH: tl.constexpr,
    HELD: tl.constexpr,
    TAPS: tl.constexpr,
):
    """silu of the convolution at `rows`, of `channel`, whose shapes are broadcast."""
    w0, w1, w2, w3 = taps(kernel, channel, TAPS)
    h, g, is_old, is_new = locate(new, old, rows, oldest, shift, count, WIDTH, HELD)
    mixed = read(h, g, is_old, is_new, channel) * w0
    h, g, is_old, is_new = locate(new, old, rows - 1, oldest, shift, count, WIDTH, HELD)
    mixed += read(h, g, is_old & (TAPS > 1), is_new, channel) * w1
    h, g, is_old, is_new = locate(new, old, rows - 2, oldest, shift, count, WIDTH, HELD)
    mixed += read(h, g, is_old & (TAPS > 2), is_new, channel) * w2
    h, g, is_old, is_new = locate(new, old, rows - 3, oldest, shift, count, WIDTH, HELD)
    mixed += read(h, g, is_old & (TAPS > 3), is_new, channel) * w3
    return silu(mixed)


@triton.jit
def run_chunk(
    memory,  # [SLICES,D/SLICES,COLUMNS]: a state's rows in slices, one a warp
    first,
    stop,
    new,
    old,
    kernel,
    outputs,
    oldest,
    shift,
    count,
    slope,
    bias,
    q_channel,  # [SLICES,1,D/SLICES]
    k_channel,
    v_channel,  # [COLUMNS]
    b_channel,
    a_channel,
    WIDTH: tl.constexpr,
    HELD: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """The state after rows first … min(first + CHUNK, stop), whose outputs it stores.

    With G the running sum of log decays and d_i the change of row i, it solves
    (I + A) d = beta · (v - exp(G) k·state), A_ij = beta_i exp(G_i - G_j) k_i·k_j for j < i,
    forward (arXiv 2412.06464, section 3.3). It rounds otherwise than row by row.
    """
    at = tl.arange(0, CHUNK)
    rows = first + at
    row = rows[:, None]
    by_slice = rows[None, :, None]
    q = mix_rows(new, old, kernel, by_slice, oldest, shift, count, q_channel, WIDTH, HELD, TAPS)
    k = mix_rows(new, old, kernel, by_slice, oldest, shift, count, k_channel, WIDTH, HELD, TAPS)
    v = mix_rows(new, old, kernel, row, oldest, shift, count, v_channel[None, :], WIDTH, HELD, TAPS)
    h, g, is_old, is_new = locate(new, old, rows, oldest, shift, count, WIDTH, HELD)
    b = read(h, g, is_old, is_new, b_channel)
    a = read(h, g, is_old, is_new, a_channel)
    beta, log_decay = gates(b, a, slope, bias)
    # Rows past the last are none: they change and forget nothing.
    is_row = rows < stop
    beta = tl.where(is_row, beta, 0.0)
    log_decay = tl.where(is_row, log_decay, 0.0)
    q_sum = tl.sum(tl.sum(q * q, 2), 0)
    k_sum = tl.sum(tl.sum(k * k, 2), 0)
    q = q / tl.sqrt_rn(q_sum + 1e-6)[None, :, None] * (HEAD_DIM**-0.5)
    k = k / tl.sqrt_rn(k_sum + 1e-6)[None, :, None]

    # Sums of the decays between two rows, not differences of sums, which would cancel.
    is_past = at[:, None] > at[None, :]
    since = tl.cumsum(tl.where(is_past, log_decay[:, None], 0.0), 0)
    rest = tl.sum(tl.where(at[:, None] == CHUNK - 1, since, 0.0), 0)
    faded = tl.exp(since)
    before = tl.exp(tl.cumsum(log_decay, 0))[:, None]
    turned = tl.permute(k, (0, 2, 1))
    k_by_k = tl.sum(tl.dot(k, turned, input_precision=PRECISION), 0)
    rule = tl.where(is_past, k_by_k * faded * beta[:, None], 0.0)
    known = tl.sum(tl.dot(k, memory, input_precision=PRECISION), 0) * before
    change = (v - known) * beta[:, None]
    for one in tl.range(1, CHUNK):
        weights = tl.sum(tl.where(at[:, None] == one, rule, 0.0), 0)
        done = tl.sum(weights[:, None] * change, 0)
        change = tl.where(at[:, None] == one, change - done[None, :], change)

    q_by_k = tl.sum(tl.dot(q, turned, input_precision=PRECISION), 0) * faded
    seen = tl.where(at[:, None] >= at[None, :], q_by_k, 0.0)
    attended = tl.sum(tl.dot(q, memory, input_precision=PRECISION), 0) * before
    attended += tl.dot(seen, change, input_precision=PRECISION)
    place = outputs[None, :] + tl.maximum(row, 0).to(tl.int64) * OUTPUTS
    tl.store(place, attended, mask=(row < stop) & (row >= 0))

    left = turned * tl.exp(rest)[None, None, :]
    each = tl.broadcast_to(change[None, :, :], [k.shape[0], CHUNK, change.shape[1]])
    kept = memory * tl.exp(tl.sum(log_decay, 0))
    return kept + tl.dot(left, each, input_precision=PRECISION)


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
    CHUNK: tl.constexpr,  # rows at a time; 1 goes row by row
    SLICES: tl.constexpr,  # of a state's rows, for chunks
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
    own_side = sequence * 2 + tl.load(side + sequence)
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

    # A slot that begins anew has what its last sequence left.
    if CHUNK > 1:
        SLICE: tl.constexpr = HEAD_DIM // SLICES
        slices = tl.arange(0, SLICES)[:, None, None] * SLICE
        slice_row = slices + tl.arange(0, SLICE)[None, :, None]
        places = own_state + slice_row * HEAD_DIM + own[None, None, :]
        memory = tl.load(state + places, mask=settled != 0, other=0.0)
        q_channel = q_first + slices + tl.arange(0, SLICE)[None, None, :]
        k_channel = KEY_HEADS * HEAD_DIM + q_channel
        settling = tl.cdiv(cut - begin, CHUNK)
        for index in tl.range(0, settling + tl.cdiv(count - cut, CHUNK)):
            if index == settling:
                tl.store(state_out + places, memory, mask=is_live)
            is_open = index >= settling
            memory = run_chunk(
                memory,
                tl.where(is_open, cut + (index - settling) * CHUNK, begin + index * CHUNK),
                tl.where(is_open, count, cut),
                new,
                old,
                kernel,
                outputs,
                oldest,
                shift,
                count,
                slope,
                bias,
                q_channel,
                k_channel,
                v_channel,
                b_channel,
                a_channel,
                WIDTH,
                HELD,
                TAPS,
                CHUNK,
                HEAD_DIM,
                OUTPUTS,
            )
    else:
        places = own_state + d[:, None] * HEAD_DIM + own[None, :]
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

"""A chunk of rows of the recurrence at once: products of matrices where rows would wait for rows.

With G_ij the sum of the log decays of rows j + 1 … i, S the state before the chunk and u_i what row
i adds to it, the delta rule is a triangular system (arXiv 2412.06464, section 3.3; DeltaNet's WY
form, arXiv 2406.06484):

    (I + A) u = beta · (v - exp(G_i) k_i S),      A_ij = beta_i exp(G_ij) k_i·k_j for j < i
    o_i = exp(G_i) q_i S + Σ_j≤i exp(G_ij) (q_i·k_j) u_j,      S' = exp(G) S + Σ_j exp(G_j) k_jᵀ u_j

A state passes through a program in slices of its rows: it is read for the products, and again, from
the L2 cache, for its update. So no thread keeps it. q and k enter the products as the convolution
left them, and what they are normalised by scales the results. Rows that settle before a call have
no outputs, and rows that may be taken back change no state, so steps skip those products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_plugins.gated_delta_step.rows import gates, silu, taps


@triton.jit
def raw(
    new,
    old,
    row,
    oldest,
    shift,
    stop,
    channel,
    is_reached,
    WIDTH: tl.constexpr,
    HELD: tl.constexpr,
):
    """`channel` of raw rows as float32; 0 where there is nothing, and from `stop` on, where rows
    lie that may be taken back: 0 times NaN is NaN. Offsets have 32 bits.
    """
    slot = tl.minimum(tl.maximum(row + shift, 0), HELD - 1)
    is_old = (row >= oldest) & (row < 0) & is_reached
    is_new = (row >= 0) & (row < stop)
    before = tl.load(old + (slot * WIDTH + channel), mask=is_old, other=0.0)
    now = tl.load(new + (tl.maximum(row, 0) * WIDTH + channel), mask=is_new, other=0.0)
    return tl.where(row < 0, before, now.to(tl.float32))


@triton.jit
def mix_rows(
    new,
    old,
    kernel,
    row,
    oldest,
    shift,
    stop,
    channel,
    WIDTH: tl.constexpr,
    HELD: tl.constexpr,
    TAPS: tl.constexpr,
):
    """silu of the convolution at rows [R,1], of channels [1,C]."""
    w0, w1, w2, w3 = taps(kernel, channel, TAPS)
    mixed = raw(new, old, row, oldest, shift, stop, channel, True, WIDTH, HELD) * w0
    mixed += raw(new, old, row - 1, oldest, shift, stop, channel, TAPS > 1, WIDTH, HELD) * w1
    mixed += raw(new, old, row - 2, oldest, shift, stop, channel, TAPS > 2, WIDTH, HELD) * w2
    mixed += raw(new, old, row - 3, oldest, shift, stop, channel, TAPS > 3, WIDTH, HELD) * w3
    return silu(mixed)


@triton.jit
def multiply(a, b, found):
    """found + a b, as exact as float32: numbers are three of bfloat16, of whose nine products those
    below the last bit are left out. Their operands move with fewer instructions than TF32's.
    """
    return tl.dot(a, b, found, input_precision="bf16x6")


@triton.jit
def join(inverse, rule, row, column, BLOCK: tl.constexpr):
    """From the inverses of the diagonal's blocks of BLOCK rows, those of blocks twice as large."""
    is_below = (row // BLOCK % 2 == 1) & (column // BLOCK == row // BLOCK - 1)
    below = tl.where(is_below, rule, 0.0)
    taken = tl.dot(below, inverse, input_precision="ieee")
    return inverse - tl.dot(inverse, taken, input_precision="ieee")


@triton.jit
def invert(rule, row, column):
    """(I + rule)⁻¹ of a strictly lower triangular rule [16,16].

    Products of its powers would be shorter, but those of equal keys grow to thousands and cancel.
    Entries of an inverse are at most 1: |T_ij| = beta_i exp(G_ij) |k_i Π(I - beta_l k_lᵀk_l) k_jᵀ|.
    """
    inverse = tl.where(row == column, 1.0, 0.0)
    inverse -= tl.where((row % 2 == 1) & (column == row - 1), rule, 0.0)
    inverse = join(inverse, rule, row, column, 2)
    inverse = join(inverse, rule, row, column, 4)
    return join(inverse, rule, row, column, 8)


@triton.jit
def run_chunk(
    before_chunk,  # the state of a head [D,D], in memory
    is_begun,  # whether there is one yet; nothing is read of a slot that begins
    after_chunk,
    is_kept,
    first,
    stop,
    is_last,
    new,
    old,
    kernel,
    outputs,
    oldest,
    shift,
    slope,
    bias,
    own,  # [COLUMNS]: of the state
    q_first,
    k_first,
    v_first,
    b_channel,
    a_channel,
    WIDTH: tl.constexpr,
    HELD: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    SLICE: tl.constexpr,
    UPDATED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Rows first … min(first + CHUNK, stop): outputs of those in the call, and the state after."""
    at = tl.arange(0, CHUNK)
    row = first + at[:, None]
    d = tl.arange(0, SLICE)
    has_outputs = stop > 0
    k_by_k = tl.zeros((CHUNK, CHUNK), tl.float32)
    q_by_k = tl.zeros((CHUNK, CHUNK), tl.float32)
    q_squares = tl.zeros((CHUNK,), tl.float32)
    known = tl.zeros((CHUNK, own.shape[0]), tl.float32)
    attended = tl.zeros((CHUNK, own.shape[0]), tl.float32)
    for begin in tl.range(0, HEAD_DIM, SLICE, disable_licm=True):
        places = (begin + d)[:, None] * HEAD_DIM + own[None, :]
        k_channel = k_first + begin + d[None, :]
        k = mix_rows(new, old, kernel, row, oldest, shift, stop, k_channel, WIDTH, HELD, TAPS)
        k_turned = tl.trans(k)
        k_by_k = multiply(k, k_turned, k_by_k)
        memory = tl.load(before_chunk + places, mask=is_begun, other=0.0)
        known = multiply(k, memory, known)
        if has_outputs:
            q_channel = q_first + begin + d[None, :]
            q = mix_rows(new, old, kernel, row, oldest, shift, stop, q_channel, WIDTH, HELD, TAPS)
            q_by_k = multiply(q, k_turned, q_by_k)
            attended = multiply(q, memory, attended)
            q_squares += tl.sum(q * q, 1)

    rows = first + at
    b = raw(new, old, rows, oldest, shift, stop, b_channel, True, WIDTH, HELD)
    a = raw(new, old, rows, oldest, shift, stop, a_channel, True, WIDTH, HELD)
    beta, log_decay = gates(b, a, slope, bias)
    # Rows past the last are none: they change and forget nothing.
    beta = tl.where(rows < stop, beta, 0.0)
    log_decay = tl.where(rows < stop, log_decay, 0.0)
    # Sums of the decays between two rows, not differences of sums, which would cancel.
    is_past = at[:, None] > at[None, :]
    later = tl.where(is_past, log_decay[:, None], 0.0)
    before = tl.exp(tl.cumsum(log_decay, 0))
    after = tl.exp(tl.sum(later, 0))
    k_squares = tl.sum(tl.where(at[:, None] == at[None, :], k_by_k, 0.0), 1)
    k_unit = tl.rsqrt(k_squares + 1e-6)
    fade = tl.exp(tl.cumsum(later, 0)) * k_unit[None, :]
    rule = tl.where(is_past, k_by_k * fade * (beta * k_unit)[:, None], 0.0)
    inverse = invert(rule, at[:, None], at[None, :])
    v_channel = v_first + own[None, :]
    v = mix_rows(new, old, kernel, row, oldest, shift, stop, v_channel, WIDTH, HELD, TAPS)
    wanted = v * beta[:, None] - known * (before * beta * k_unit)[:, None]
    nothing = tl.zeros((CHUNK, own.shape[0]), tl.float32)
    change = multiply(inverse, wanted, nothing)

    if has_outputs:
        q_unit = tl.rsqrt(q_squares + 1e-6) * (HEAD_DIM**-0.5)
        seen = tl.where(at[:, None] >= at[None, :], q_by_k * fade, 0.0)
        attended = multiply(seen, change, attended * before[:, None])
        place = tl.maximum(row, 0) * OUTPUTS + own[None, :]
        tl.store(outputs + place, attended * q_unit[:, None], mask=(row < stop) & (row >= 0))

    if not is_last:
        kept = change * (after * k_unit)[:, None]
        updated = tl.arange(0, UPDATED)
        left = tl.exp(tl.sum(log_decay, 0))
        for begin in tl.range(0, HEAD_DIM, UPDATED, disable_licm=True):
            places = (begin + updated)[:, None] * HEAD_DIM + own[None, :]
            memory = tl.load(before_chunk + places, mask=is_begun, other=0.0)
            k_channel = k_first + begin + updated[None, :]
            k = mix_rows(new, old, kernel, row, oldest, shift, stop, k_channel, WIDTH, HELD, TAPS)
            memory = multiply(tl.trans(k), kept, memory * left)
            tl.store(after_chunk + places, memory, mask=is_kept)

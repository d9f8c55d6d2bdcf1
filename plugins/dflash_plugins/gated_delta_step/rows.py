"""Rows as they come from a layer's projections: where they lie, their convolution, their gates."""

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

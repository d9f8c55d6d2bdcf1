"""Rows of logits in kernels: their groups of tokens, opened by the order of ids; keys; weights."""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_plugins.row_sample.noise import GROUP


@triton.jit
def load_logits(source, token, VOCABULARY: tl.constexpr):
    """Float32 logits of token ids; -inf past the vocabulary."""
    value = tl.load(source + token, mask=token < VOCABULARY, other=float("-inf"))
    return value.to(tl.float32)


@triton.jit
def list_groups(listed, group, is_listed, VOCABULARY: tl.constexpr):
    """How many groups are listed: in the order of their ids, in `listed`.

    All threads of a program must come here: branches on the way turn on reductions, which all know.
    """
    end: tl.constexpr = (VOCABULARY + GROUP - 1) // GROUP
    is_listed = is_listed & (group < end)
    counted = is_listed.to(tl.int32)
    # Threads that open groups of the list before must have read it: it is written over.
    tl.debug_barrier()
    tl.store(listed + tl.cumsum(counted, axis=0) - 1, group, mask=is_listed)
    # Others open what each thread has listed; a block's barrier orders its global memory too.
    tl.debug_barrier()
    return tl.sum(counted, axis=0)


@triton.jit
def open_groups(source, listed, opened, first, VOCABULARY: tl.constexpr, OPENED: tl.constexpr):
    """OPENED of `opened` listed groups from number `first` on: ids, tokens and logits [OPENED,256].

    Ids and tokens past the list are past the vocabulary.
    """
    # Written before list_groups's last barrier, and not again before the next one's first.
    number = first + tl.arange(0, OPENED)
    end: tl.constexpr = (VOCABULARY + GROUP - 1) // GROUP
    group = tl.load(listed + number, mask=number < opened, other=end)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return group, token, load_logits(source, token, VOCABULARY)


@triton.jit
def sum_of(values):
    return tl.sum(tl.sum(values, axis=1), axis=0)


@triton.jit
def min_of(values):
    return tl.min(tl.min(values, axis=1), axis=0)


@triton.jit
def key_of(value, KEY_BITS: tl.constexpr):
    """Maps logits to integers of KEY_BITS bits (uint32) that have the same order and ties."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0 makes -0 the 0 that it equals
    ordered = tl.where(bits < 0, ~bits, bits ^ (-0x80000000)).to(tl.uint32, bitcast=True)
    return ordered >> (32 - KEY_BITS)


@triton.jit
def is_ranked(token, value, border, tie_end, VOCABULARY: tl.constexpr, KEY_BITS: tl.constexpr):
    """Which tokens have a key above `border`, or that key and an id below `tie_end`."""
    key, lowest = key_of(value, KEY_BITS), border.to(tl.uint32)
    is_before = (key > lowest) | ((key == lowest) & (token < tie_end))
    return is_before & (token < VOCABULARY)


@triton.jit
def scale(value, highest, temperature):
    """(value - highest) / temperature in float32; 0 for the highest at any temperature."""
    # Not 0, which would make no number of -inf: temperatures above 1e37 count as that.
    factor = tl.maximum((1.0 / temperature).to(tl.float32), 1e-37)
    scaled = (value - highest) * factor
    return tl.where(value == highest, 0.0, scaled)


@triton.jit
def weight_of(value, highest, temperature):
    """A token's probability without the softmax's normalisation."""
    return tl.exp(scale(value, highest, temperature))

"""What a row keeps: the border of top-k, by bisection over keys; the weight of what ranks first."""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_plugins.row_sample.rows import (
    is_ranked,
    key_of,
    list_groups,
    min_of,
    open_groups,
    sum_of,
    weight_of,
)


@triton.jit
def find_top_k(
    source,
    listed,
    group,
    key,
    top_k,
    top,
    VOCABULARY: tl.constexpr,
    OPENED: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """The k-th highest key by bisection, and the end of the ids with that key in the top k.

    `key` is of the highest logit of each group; only groups that reach the border are opened.
    """
    low = _find_peak(key, top_k, top)
    opened = list_groups(listed, group, key >= low.to(tl.uint32), VOCABULARY)
    high, above = top + 1, tl.full((), 0, tl.int64)
    while high - low > 1:  # invariant: count(low) >= k > count(high) = above
        middle = (low + high) // 2
        count = _count(source, listed, opened, middle, VOCABULARY, OPENED, KEY_BITS)
        if count >= top_k:
            low = middle
        else:
            high = middle
            above = count
    ties = top_k - above
    return low, _find_tie_end(source, listed, opened, low, ties, VOCABULARY, OPENED, KEY_BITS)


@triton.jit
def _find_peak(key, top_k, top):
    """The highest key that at least top_k groups reach, 0 if there are fewer groups.

    The k-th highest token is not below it.
    """
    low, high = tl.full((), 0, tl.int64), top + 1
    while high - low > 1:
        middle = (low + high) // 2
        if tl.sum((key >= middle.to(tl.uint32)).to(tl.int32), axis=0) >= top_k:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _count(
    source,
    listed,
    opened,
    border,
    VOCABULARY: tl.constexpr,
    OPENED: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """How many tokens of the listed groups have a key of at least `border`."""
    total = tl.full((), 0, tl.int64)
    for first in tl.range(0, opened, OPENED):
        _, token, value = open_groups(source, listed, opened, first, VOCABULARY, OPENED)
        reaches = (key_of(value, KEY_BITS) >= border.to(tl.uint32)) & (token < VOCABULARY)
        total += sum_of(reaches.to(tl.int32)).to(tl.int64)
    return total


@triton.jit
def _find_tie_end(
    source,
    listed,
    opened,
    border,
    ties,
    VOCABULARY: tl.constexpr,
    OPENED: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """The end of the ids that keep only the first `ties` tokens with the key `border`."""
    end = tl.full((), VOCABULARY, tl.int32)
    before = tl.full((), 0, tl.int64)
    for first in tl.range(0, opened, OPENED):
        _, token, value = open_groups(source, listed, opened, first, VOCABULARY, OPENED)
        on = key_of(value, KEY_BITS) == border.to(tl.uint32)
        on = (on & (token < VOCABULARY)).to(tl.int32)
        on_group = tl.sum(on, axis=1)
        earlier = before + tl.cumsum(on_group, axis=0) - on_group
        place = earlier[:, None] + tl.cumsum(on, axis=1)
        end = tl.minimum(end, min_of(tl.where((on > 0) & (place > ties), token, VOCABULARY)))
        before += tl.sum(on_group, axis=0)
    return end


@triton.jit
def weigh(
    source,
    listed,
    group,
    key,
    highest,
    temperature,
    border,
    tie_end,
    VOCABULARY: tl.constexpr,
    OPENED: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """Float64 sum of the weights of tokens that rank before `tie_end` among those of `border`.

    `key` is of the highest logit of each group.
    """
    opened = list_groups(listed, group, key >= border.to(tl.uint32), VOCABULARY)
    total = tl.full((), 0, tl.float64)
    for first in tl.range(0, opened, OPENED):
        _, token, value = open_groups(source, listed, opened, first, VOCABULARY, OPENED)
        is_before = is_ranked(token, value, border, tie_end, VOCABULARY, KEY_BITS)
        weight = tl.where(is_before, weight_of(value, highest, temperature), 0.0)
        total += sum_of(weight).to(tl.float64)
    return total

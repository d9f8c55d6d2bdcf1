"""The winner among what a row keeps: only groups that noise can lift above the best are opened."""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_plugins.row_sample.launch import FURTHEST_HALVINGS, FURTHEST_SPAN
from dflash_plugins.row_sample.noise import (
    GROUP,
    MARGIN,
    estimate_exponential,
    exponential,
    group_words,
    token_words,
)
from dflash_plugins.row_sample.rows import (
    is_ranked,
    list_groups,
    load_logits,
    open_groups,
    scale,
)

NO_TOKEN = tl.constexpr(0x7FFFFFFF)
FURTHEST, HALVINGS = tl.constexpr(FURTHEST_SPAN), tl.constexpr(FURTHEST_HALVINGS)


@triton.jit
def _near(
    token,
    value,
    x,
    k,
    highest,
    temperature,
    border,
    tie_end,
    VOCABULARY: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """Estimated scores of tokens, -inf of those that are not kept."""
    is_kept = is_ranked(token, value, border, tie_end, VOCABULARY, KEY_BITS)
    scaled = tl.where(is_kept, scale(value, highest, temperature), float("-inf"))
    more = estimate_exponential(token_words(k, token % GROUP))
    is_member = x % GROUP == (token % GROUP).to(tl.uint64)
    return scaled - tl.log(estimate_exponential(x) * (1.0 / GROUP) + tl.where(is_member, 0.0, more))


@triton.jit
def _exact(
    source,
    group_id,
    highest,
    temperature,
    seed,
    position,
    border,
    tie_end,
    VOCABULARY: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """The best score (float64) of a group's kept tokens, and the lowest id that has it."""
    token = group_id * GROUP + tl.arange(0, GROUP)
    x, k = group_words(seed, position, token // GROUP)
    value = load_logits(source, token, VOCABULARY)
    scaled = (value.to(tl.float64) - highest.to(tl.float64)) / temperature
    is_member = x % GROUP == (token % GROUP).to(tl.uint64)
    more = tl.where(is_member, 0.0, exponential(token_words(k, token % GROUP)))
    score = scaled - tl.log(exponential(x) * (1.0 / GROUP) + more)
    is_kept = is_ranked(token, value, border, tie_end, VOCABULARY, KEY_BITS)
    score = tl.where(is_kept, score, float("-inf"))
    best = tl.max(score, axis=0)
    return best, tl.min(tl.where(score == best, token, NO_TOKEN), axis=0)


@triton.jit
def _open_near(
    source,
    listed,
    opened,
    first,
    highest,
    temperature,
    seed,
    position,
    border,
    tie_end,
    VOCABULARY: tl.constexpr,
    OPENED: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """OPENED listed groups from number `first` on: their ids and best estimated scores."""
    group_id, token, value = open_groups(source, listed, opened, first, VOCABULARY, OPENED)
    x, k = group_words(seed, position, group_id)
    x, k = x[:, None], k[:, None]
    near = _near(token, value, x, k, highest, temperature, border, tie_end, VOCABULARY, KEY_BITS)
    return group_id, tl.max(near, axis=1)


@triton.jit
def draw(
    source,
    listed,
    group,
    reach,
    highest,
    temperature,
    seed,
    position,
    border,
    tie_end,
    VOCABULARY: tl.constexpr,
    OPENED: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """The kept token with the highest logit / temperature + noise; on a tie the lowest id.

    No token of a group gets ahead of its `reach`, -inf where none is kept.
    """
    opened = list_groups(listed, group, reach >= _find_furthest(reach, OPENED), VOCABULARY)
    _, near = _open_near(
        source,
        listed,
        opened,
        0,
        highest,
        temperature,
        seed,
        position,
        border,
        tie_end,
        VOCABULARY,
        OPENED,
        KEY_BITS,
    )
    estimate = tl.max(near, axis=0)
    winner = tl.full((), NO_TOKEN, tl.int32)
    best = tl.full((), float("-inf"), tl.float64)
    end: tl.constexpr = (VOCABULARY + GROUP - 1) // GROUP
    may_win = (reach >= estimate - MARGIN) & (reach > float("-inf"))
    opened = list_groups(listed, group, may_win, VOCABULARY)
    for first in tl.range(0, opened, OPENED):
        group_id, near = _open_near(
            source,
            listed,
            opened,
            first,
            highest,
            temperature,
            seed,
            position,
            border,
            tie_end,
            VOCABULARY,
            OPENED,
            KEY_BITS,
        )
        estimate = tl.maximum(estimate, tl.max(near, axis=0))
        # Few groups are left, as a rule one: float64 for all that are open would be slow.
        is_near = near >= estimate - MARGIN
        nearest = tl.min(tl.where(is_near, group_id, end), axis=0)
        while nearest < end:
            score, token = _exact(
                source,
                nearest,
                highest,
                temperature,
                seed,
                position,
                border,
                tie_end,
                VOCABULARY,
                KEY_BITS,
            )
            if score > best:
                best = score
                winner = token
            nearest = tl.min(tl.where(is_near & (group_id > nearest), group_id, end), axis=0)
    return winner


@triton.jit
def _find_furthest(reach, OPENED: tl.constexpr):
    """What about OPENED groups reach, by bisection: at least one, seldom more."""
    high = tl.max(reach, axis=0)
    low = high - FURTHEST
    for _ in tl.range(0, HALVINGS):
        middle = 0.5 * (low + high)
        if tl.sum((reach >= middle).to(tl.int32), axis=0) > OPENED:
            low = middle
        else:
            high = middle
    return high

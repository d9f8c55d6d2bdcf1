"""The target's token of one row of logits: argmax, or a Gumbel-max sample with counter-based noise.

`row_groups` reads the rows once, in as many programs as there are tiles: the highest logit of each
group of 256 tokens, and its weight where top-p needs that. `row_sample` has a program for a row and
opens only groups that matter: those that reach the border of top-k, those that noise can lift above
the best, and those that rank before a winner, to see whether it is in the nucleus of top-p. The
definition is dflash_trt/sampling/choice.py and draw.py. Opened groups are in the order of their
ids, OPENED at a time, as equal logits rank by id.
Probabilities are summed in float32 within as many groups and in float64 across them. So the
nucleus of top-p may differ from NumPy's by a token if its mass is within about 1e-7 of top_p.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_plugins.row_sample.draw import NO_TOKEN, draw
from dflash_plugins.row_sample.noise import GROUP, group_bound
from dflash_plugins.row_sample.rows import key_of, load_logits, scale, weight_of
from dflash_plugins.row_sample.search import find_top_k, weigh


@triton.jit
def row_groups(
    logits,  # [B,S,V] float32, bfloat16 or float16
    sampling,  # as row_sample's
    rows,  # S
    peaks,  # float32 [B,S,V/256]: the highest logit of a group; +inf if it holds NaN or +inf
    weights,  # float32 [B,S,V/256]: sum of exp((logit - peak) / temperature), if top-p needs it
    VOCABULARY: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):
    """Grid (tiles of TILE_GROUPS groups, B·S)."""
    row = tl.program_id(1).to(tl.int64)
    COUNT: tl.constexpr = (VOCABULARY + GROUP - 1) // GROUP
    group = tl.program_id(0) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = load_logits(logits + row * VOCABULARY, token, VOCABULARY)
    is_strange = ((value != value) | (value == float("inf"))).to(tl.int32)
    peak = tl.where(tl.max(is_strange, axis=1) > 0, float("inf"), tl.max(value, axis=1))
    # No program writes another's groups or reads any; row_sample reads them, in a later launch.
    tl.store(peaks + row * COUNT + group, peak, mask=group < COUNT)
    temperature, top_k, top_p = _parameters(sampling, row // rows)
    if (top_p < 1) & (temperature > 0) & ((top_k <= 0) | (top_k >= VOCABULARY)):
        weight = tl.sum(weight_of(value, peak[:, None], temperature), axis=1)
        tl.store(weights + row * COUNT + group, weight, mask=group < COUNT)


@triton.jit
def row_sample(
    logits,  # [B,S,V] float32, bfloat16 or float16
    positions,  # int64 [B,S]: absolute positions of the chosen tokens, which the noise depends on
    sampling,  # int64 [B,4]: seed, temperature's bits, top_k (0: all), top_p's bits (float64)
    peaks,  # float32 [B,S,V/256], from row_groups
    weights,  # float32 [B,S,V/256], from row_groups
    rows,  # S
    token_ids,  # int64 [B,S]; -1 where a row holds NaN or +inf, or nothing but -inf
    listed,  # int32 [B,S,V/256]: scratch, the groups that a row's program, and no other, opens next
    VOCABULARY: tl.constexpr,
    GROUPS: tl.constexpr,
    OPENED: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """Grid (B·S)."""
    row = tl.program_id(0).to(tl.int64)
    COUNT: tl.constexpr = (VOCABULARY + GROUP - 1) // GROUP
    source, listed = logits + row * VOCABULARY, listed + row * COUNT
    group = tl.arange(0, GROUPS)
    is_group = group < COUNT
    peak = tl.load(peaks + row * COUNT + group, mask=is_group, other=float("-inf"))
    temperature, top_k, top_p = _parameters(sampling, row // rows)

    highest = tl.max(peak, axis=0)
    if (highest == float("-inf")) | (highest == float("inf")):
        tl.store(token_ids + row, -1)
    elif temperature == 0:
        first = tl.min(tl.where(peak == highest, group, COUNT), axis=0)
        place = first * GROUP + tl.arange(0, GROUP)
        is_choice = load_logits(source, place, VOCABULARY) == highest
        choice = tl.min(tl.where(is_choice, place, NO_TOKEN), axis=0)
        tl.store(token_ids + row, tl.where(choice == NO_TOKEN, -1, choice).to(tl.int64))
    else:
        # Kept: tokens with a key above `border`, and those equal to it with an id below `tie_end`.
        key = tl.where(is_group, key_of(peak, KEY_BITS), 0)  # no logit's key is 0
        scaled = tl.where(is_group, scale(peak, highest, temperature), float("-inf"))
        border, tie_end = tl.full((), 0, tl.int64), tl.full((), VOCABULARY, tl.int32)
        has_top_k = (top_k > 0) & (top_k < VOCABULARY)
        if has_top_k:
            top = key_of(highest, KEY_BITS).to(tl.int64)
            border, tie_end = find_top_k(
                source, listed, group, key, top_k, top, VOCABULARY, OPENED, KEY_BITS
            )
        wanted = tl.full((), float("inf"), tl.float64)
        if top_p < 1:
            if has_top_k:
                total = weigh(
                    source,
                    listed,
                    group,
                    key,
                    highest,
                    temperature,
                    border,
                    tie_end,
                    VOCABULARY,
                    OPENED,
                    KEY_BITS,
                )
            else:
                weight = tl.load(weights + row * COUNT + group, mask=is_group, other=0.0)
                total = tl.sum(weight.to(tl.float64) * tl.exp(scaled).to(tl.float64), axis=0)
            # Groups' weights that are no numbers, or negative, have no nucleus.
            wanted = tl.where(total > 0, top_p * total, wanted)
        seed, position = tl.load(sampling + (row // rows) * 4), tl.load(positions + row)
        bound = group_bound(seed, position, group)
        token, before = tl.full((), 0, tl.int32), wanted
        # The nucleus is what ranks first: a winner in it is its winner, and if one is not in it,
        # then its winner is among what ranks before that.
        while (before >= wanted) & (token != NO_TOKEN):
            reach = tl.where(key >= border.to(tl.uint32), scaled + bound, float("-inf"))
            token = draw(
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
                VOCABULARY,
                OPENED,
                KEY_BITS,
            )
            before = tl.full((), 0, tl.float64)
            if top_p < 1:
                value = tl.load(source + token, mask=token < VOCABULARY, other=0.0).to(tl.float32)
                border, tie_end = key_of(value, KEY_BITS).to(tl.int64), token
                before = weigh(
                    source,
                    listed,
                    group,
                    key,
                    highest,
                    temperature,
                    border,
                    tie_end,
                    VOCABULARY,
                    OPENED,
                    KEY_BITS,
                )
        tl.store(token_ids + row, tl.where(token == NO_TOKEN, -1, token).to(tl.int64))


@triton.jit
def _parameters(sampling, sequence):
    """temperature (float64), top_k (int64; 0: all) and top_p (float64; 1: all).

    TensorRT times kernels over arbitrary numbers: a top_p that is no probability keeps all tokens.
    """
    parameters = sampling + sequence * 4
    temperature = tl.load(parameters + 1).to(tl.float64, bitcast=True)
    top_p = tl.load(parameters + 3).to(tl.float64, bitcast=True)
    return (
        temperature,
        tl.load(parameters + 2),
        tl.where((top_p > 0) & (top_p < 1), top_p, 1.0),
    )

"""The target's token of one row of logits: argmax, or a Gumbel-max sample with counter-based noise.

Program t handles row t of the B·S rows and reads it once for each pass below. The definition is
dflash_trt/sampling/choice.py and noise.py. Exact noise needs float64 logarithms, slow on most GPUs.
So a float32 estimate finds candidates first: those within MARGIN of the best include the winner.
A tile in which no group of tokens can reach it needs no words of its own.
Probabilities are summed in float32 within a tile of tokens and in float64 across tiles. So the
nucleus of top-p may differ from NumPy's by a token if its mass is within about 1e-7 of top_p.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(256)  # noise.GROUP
MARGIN = tl.constexpr(0.01)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def row_sample(
    logits,  # [B,S,V] float32, bfloat16 or float16
    positions,  # int64 [B,S]: absolute positions of the chosen tokens, which the noise depends on
    sampling,  # int64 [B,4]: seed, temperature's bits, top_k (0: all), top_p's bits (float64)
    rows,  # S
    token_ids,  # int64 [B,S]; -1 where a row holds NaN or +inf, or nothing but -inf
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * VOCABULARY
    parameters = sampling + (row // rows) * 4
    seed = tl.load(parameters)
    temperature = tl.load(parameters + 1).to(tl.float64, bitcast=True)
    top_k = tl.load(parameters + 2)
    top_p = tl.load(parameters + 3).to(tl.float64, bitcast=True)

    highest, choice, is_number = _find_highest(source, VOCABULARY, BLOCK)
    if not is_number:
        tl.store(token_ids + row, -1)
    elif temperature == 0:
        tl.store(token_ids + row, choice.to(tl.int64))
    else:
        # Kept: tokens with a key above `border`, and those equal to it with an id below `tie_end`.
        border, ties = tl.full((), 0, tl.int64), tl.full((), VOCABULARY, tl.int64)
        if (top_k > 0) & (top_k < VOCABULARY):
            border, ties = _find_top_k(source, top_k, VOCABULARY, BLOCK, KEY_BITS)
        if top_p < 1:
            border, ties = _find_top_p(
                source, highest, temperature, top_p, border, ties, VOCABULARY, BLOCK, KEY_BITS
            )
        tie_end = _find_tie_end(source, border, ties, VOCABULARY, BLOCK, KEY_BITS)
        position = tl.load(positions + row)
        token = _draw(
            source,
            highest,
            temperature,
            seed,
            position,
            border,
            tie_end,
            VOCABULARY,
            BLOCK,
            KEY_BITS,
        )
        tl.store(token_ids + row, token.to(tl.int64))


@triton.jit
def _load(source, first, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK token ids from `first` on and their float32 logits; -inf past the vocabulary."""
    token = first + tl.arange(0, BLOCK)
    value = tl.load(source + token, mask=token < VOCABULARY, other=float("-inf"))
    return token, value.to(tl.float32)


@triton.jit
def _find_highest(source, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """The highest logit, the lowest id that has it, and whether the row is valid (token_ids)."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.full((BLOCK,), NO_TOKEN, tl.int32)
    strange = tl.full((BLOCK,), 0, tl.int32)
    for first in range(0, VOCABULARY, BLOCK):
        token, value = _load(source, first, VOCABULARY, BLOCK)
        strange = strange | ((value != value) | (value == float("inf"))).to(tl.int32)
        place = tl.where(value > best, token, place)
        best = tl.where(value > best, value, best)
    highest = tl.max(best, axis=0)
    choice = tl.min(tl.where(best == highest, place, NO_TOKEN), axis=0)
    return highest, choice, (tl.max(strange, axis=0) == 0) & (highest > float("-inf"))


@triton.jit
def _key(value, KEY_BITS: tl.constexpr):
    """Maps logits to integers of KEY_BITS bits (uint32) that have the same order and ties."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0 makes -0 the 0 that it equals
    ordered = tl.where(bits < 0, ~bits, bits ^ (-0x80000000)).to(tl.uint32, bitcast=True)
    return ordered >> (32 - KEY_BITS)


@triton.jit
def _count(source, border, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, KEY_BITS: tl.constexpr):
    """How many tokens have a key of at least `border`."""
    total = tl.full((BLOCK,), 0, tl.int32)
    least = border.to(tl.uint32)
    for first in range(0, VOCABULARY, BLOCK):
        token, value = _load(source, first, VOCABULARY, BLOCK)
        total += ((_key(value, KEY_BITS) >= least) & (token < VOCABULARY)).to(tl.int32)
    return tl.sum(total, axis=0).to(tl.int64)


@triton.jit
def _find_top_k(
    source, top_k, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, KEY_BITS: tl.constexpr
):
    """The k-th highest key by bisection, and how many tokens with that key are in the top k."""
    low, high = tl.full((), 0, tl.int64), tl.full((), 1 << KEY_BITS, tl.int64)
    while high - low > 1:  # invariant: count(low) >= k > count(high)
        middle = (low + high) // 2
        if _count(source, middle, VOCABULARY, BLOCK, KEY_BITS) >= top_k:
            low = middle
        else:
            high = middle
    return low, top_k - _count(source, high, VOCABULARY, BLOCK, KEY_BITS)


@triton.jit
def _scale(value, highest, temperature):
    """(value - highest) / temperature in float32; 0 for the highest at any temperature."""
    scaled = (value - highest) * (1.0 / temperature).to(tl.float32)
    return tl.where(value == highest, 0.0, scaled)


@triton.jit
def _weight(value, highest, temperature):
    """A token's probability without the softmax's normalisation."""
    return tl.exp(_scale(value, highest, temperature))


@triton.jit
def _mass_above(
    source,
    highest,
    temperature,
    border,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """Float64 sum of the weights of tokens with a key above `border`."""
    total = tl.full((), 0, tl.float64)
    for first in range(0, VOCABULARY, BLOCK):
        _, value = _load(source, first, VOCABULARY, BLOCK)
        above = _key(value, KEY_BITS) > border.to(tl.uint32)
        total += tl.sum(tl.where(above, _weight(value, highest, temperature), 0.0), axis=0)
    return total


@triton.jit
def _value_of(key, KEY_BITS: tl.constexpr):
    """The logit that has `key`."""
    ordered = (key << (32 - KEY_BITS)).to(tl.uint32).to(tl.int32, bitcast=True)
    lost = (1 << (32 - KEY_BITS)) - 1  # `_key` inverts a negative number: its low zeros were ones
    bits = tl.where(ordered < 0, ordered ^ (-0x80000000), ~(ordered | lost))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _find_top_p(
    source,
    highest,
    temperature,
    top_p,
    border,
    ties,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """The lowest key in the nucleus of the top-k tokens, and how many tokens with that key are in.

    A token is in if the weights of all tokens ranked before it sum to less than top_p of the total.
    """
    above = _mass_above(source, highest, temperature, border, VOCABULARY, BLOCK, KEY_BITS)
    on_border = ties.to(tl.float64) * _weight(_value_of(border, KEY_BITS), highest, temperature)
    # Without top-k the border is 0, below every logit's key: no token has it.
    wanted = top_p * (above + tl.where(border > 0, on_border, 0.0))
    if above < wanted:
        low = border
    else:
        low, high = border, _key(highest, KEY_BITS).to(tl.int64)
        while high - low > 1:  # invariant: mass_above(low) >= wanted > mass_above(high)
            middle = (low + high) // 2
            mass = _mass_above(source, highest, temperature, middle, VOCABULARY, BLOCK, KEY_BITS)
            if mass >= wanted:
                low = middle
            else:
                high = middle
                above = mass
        low = high
        ties = tl.full((), VOCABULARY, tl.int64)
        if low == _key(highest, KEY_BITS).to(tl.int64):
            above = tl.full((), 0, tl.float64)
    weight = _weight(_value_of(low, KEY_BITS), highest, temperature).to(tl.float64)
    room = tl.math.ceil((wanted - above) / weight)
    return low, tl.minimum(ties.to(tl.float64), room).to(tl.int64)


@triton.jit
def _find_tie_end(
    source, border, ties, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, KEY_BITS: tl.constexpr
):
    """The end of the ids that keep only the first `ties` tokens with the key `border`."""
    end = tl.full((), VOCABULARY, tl.int32)
    if ties < VOCABULARY:
        before = tl.full((), 0, tl.int64)
        for first in range(0, VOCABULARY, BLOCK):
            token, value = _load(source, first, VOCABULARY, BLOCK)
            on = _key(value, KEY_BITS) == border.to(tl.uint32)
            on = (on & (token < VOCABULARY)).to(tl.int32)
            rank = before + tl.cumsum(on, axis=0)
            end = tl.minimum(end, tl.min(tl.where((on > 0) & (rank > ties), token, end), axis=0))
            before += tl.sum(on, axis=0)
    return end


@triton.jit
def _group_words(seed, position, first, BLOCK: tl.constexpr):
    """x and k (uint64) of the groups of BLOCK tokens; a call of Philox gives those of two."""
    counter = (tl.arange(0, BLOCK // (2 * GROUP)) + first // (2 * GROUP) + 1).to(tl.uint64)
    zero = tl.zeros_like(counter)
    w0, w1, w2, w3 = tl.philox(seed, counter, position.to(tl.uint64) + zero, zero, zero)
    x = tl.reshape(tl.join(w0, w2), (BLOCK // GROUP,))
    return x, tl.reshape(tl.join(w1, w3), (BLOCK // GROUP,))


@triton.jit
def _spread(groups, BLOCK: tl.constexpr):
    """What groups have [BLOCK / GROUP], for each of their tokens [BLOCK]."""
    return tl.reshape(tl.broadcast_to(groups[:, None], (BLOCK // GROUP, GROUP)), (BLOCK,))


@triton.jit
def _token_words(k, token, BLOCK: tl.constexpr):
    """The output of SplitMix64 (uint64) for BLOCK tokens, whose groups start it from k."""
    place = (token % GROUP + 1).to(tl.uint64)
    word = _spread(k, BLOCK) + place * 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _estimate_exponential(word):
    """-log(u(word)) in float32, within MARGIN / 4 of itself."""
    # float32 cannot hold u near 1, but d = 1 - u: -log(1 - d) = d (1 + d/2 …).
    upper = (word >> 32).to(tl.uint32)
    rest = ((~upper).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    near_one = rest * (1.0 + 0.5 * rest)
    uniform = (upper.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.where(rest < 0.002, near_one, -tl.log(tl.minimum(uniform, 0.999)))


@triton.jit
def _exponential(word):
    """-log(u(word)) in float64."""
    return -tl.log(((word >> 32).to(tl.float64) + 0.5) * 2.3283064365386963e-10)


@triton.jit
def _draw(
    source,
    highest,
    temperature,
    seed,
    position,
    border,
    tie_end,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """The kept token with the highest logit / temperature + noise; on a tie the lowest id."""
    winner = tl.full((), NO_TOKEN, tl.int32)
    best = tl.full((), float("-inf"), tl.float64)
    estimate = tl.full((), float("-inf"), tl.float32)
    for first in range(0, VOCABULARY, BLOCK):
        token, value = _load(source, first, VOCABULARY, BLOCK)
        key = _key(value, KEY_BITS)
        lowest = border.to(tl.uint32)
        allowed = (key > lowest) | ((key == lowest) & (token < tie_end))
        allowed = allowed & (token < VOCABULARY)
        scaled = tl.where(allowed, _scale(value, highest, temperature), float("-inf"))
        x, k = _group_words(seed, position, first, BLOCK)
        least = _spread(_estimate_exponential(x) * (1.0 / GROUP), BLOCK)
        if tl.max(scaled - tl.log(least), axis=0) >= estimate - MARGIN:
            word = _token_words(k, token, BLOCK)
            is_member = _spread(x % GROUP, BLOCK) == (token % GROUP).to(tl.uint64)
            near = scaled - tl.log(least + tl.where(is_member, 0.0, _estimate_exponential(word)))
            top = tl.max(near, axis=0)
            estimate = tl.maximum(estimate, top)
            if top >= estimate - MARGIN:
                exact = (value.to(tl.float64) - highest.to(tl.float64)) / temperature
                more = tl.where(is_member, 0.0, _exponential(word))
                score = exact - tl.log(_spread(_exponential(x) * (1.0 / GROUP), BLOCK) + more)
                score = tl.where(near >= estimate - MARGIN, score, float("-inf"))
                highest_score = tl.max(score, axis=0)
                if highest_score > best:
                    best = highest_score
                    winner = tl.min(tl.where(score == highest_score, token, NO_TOKEN), axis=0)
    return winner

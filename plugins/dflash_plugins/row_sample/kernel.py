"""The target's token of one row of logits: argmax, or the Gumbel-max draw that noise fixes.

Program t: row t of the B·S rows, which it reads again for each step. The definition is in
dflash_trt/sampling/choice.py and noise.py. Noise is float64, slow on most GPUs, so a float32
estimate first picks the tokens that can win: the winner is never further than MARGIN behind in
float32. Probabilities are summed in float32 within a block of tokens and in float64 across, so the
nucleus may end one token off NumPy's where its border is within about 1e-7 of top-p.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_NOISE = tl.constexpr(22.87)  # noise.py's, rounded up
MARGIN = tl.constexpr(0.01)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def row_sample(
    logits,  # [B,S,V] float32, bfloat16 or float16
    positions,  # int64 [B,S], of the tokens that are chosen
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
        # Tokens whose key is above `border` stay, and of those on it the ones before `tie_end`.
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
    """Token ids of a block and their logits in float32; -inf behind the vocabulary."""
    token = first + tl.arange(0, BLOCK)
    value = tl.load(source + token, mask=token < VOCABULARY, other=float("-inf"))
    return token, value.to(tl.float32)


@triton.jit
def _find_highest(source, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """The highest logit, the lowest id that has it, and whether the row is one of numbers."""
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
    """uint32 of KEY_BITS bits in the order of logits; equal where logits are."""
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
    """The k-th highest key, and how many of the tokens that have it belong to the k highest."""
    low, high = tl.full((), 0, tl.int64), tl.full((), 1 << KEY_BITS, tl.int64)
    while high - low > 1:  # count(low) >= k > count(high)
        middle = (low + high) // 2
        if _count(source, middle, VOCABULARY, BLOCK, KEY_BITS) >= top_k:
            low = middle
        else:
            high = middle
    return low, top_k - _count(source, high, VOCABULARY, BLOCK, KEY_BITS)


@triton.jit
def _scale(value, highest, temperature):
    """(value - highest) / temperature in float32, 0 for the highest at every temperature."""
    scaled = (value - highest) * (1.0 / temperature).to(tl.float32)
    return tl.where(value == highest, 0.0, scaled)


@triton.jit
def _weight(value, highest, temperature):
    """A token's probability, up to a factor that all share."""
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
    """Sum of the weights of tokens whose key is above `border`, float64."""
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
    lost = (1 << (32 - KEY_BITS)) - 1  # ones in a negative number's key, zeros in its bits
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
    """The lowest key of the nucleus of what top-k left, and how many tokens on it belong to it.

    A token stays when the weight of all that rank before it is below top_p of the total.
    """
    above = _mass_above(source, highest, temperature, border, VOCABULARY, BLOCK, KEY_BITS)
    on_border = ties.to(tl.float64) * _weight(_value_of(border, KEY_BITS), highest, temperature)
    # Without top-k the border is below every logit: no weight is on it.
    wanted = top_p * (above + tl.where(border > 0, on_border, 0.0))
    if above < wanted:
        low = border
    else:
        low, high = border, _key(highest, KEY_BITS).to(tl.int64)
        while high - low > 1:  # above(low) >= wanted > above(high)
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
    """The id behind the last of the first `ties` tokens whose key is `border`."""
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
def _random_words(seed, position, first, BLOCK: tl.constexpr):
    """Philox4x32-10 of (seed, position, token id) for a block of tokens: one call for four."""
    quad = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    low = (position & 0xFFFFFFFF).to(tl.uint32) + tl.zeros_like(quad)
    high = (position >> 32).to(tl.uint32) + tl.zeros_like(quad)
    w0, w1, w2, w3 = tl.philox(seed, quad, low, high, tl.zeros_like(quad))
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))


@triton.jit
def _estimate_noise(word):
    """-log(-log((word + 0.5) / 2^32)) in float32, within MARGIN / 4."""
    # Near 1 the distance to 1 is what float32 can hold: log(1 - d) = -d (1 + d/2 …).
    rest = ((~word).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    near_one = rest * (1.0 + 0.5 * rest)
    uniform = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponential = tl.where(rest < 0.002, near_one, -tl.log(tl.minimum(uniform, 0.999)))
    return -tl.log(exponential)


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
    """The allowed token of the highest logit / temperature + noise; the lowest id among equals."""
    winner = tl.full((), NO_TOKEN, tl.int32)
    best = tl.full((), float("-inf"), tl.float64)
    estimate = tl.full((), float("-inf"), tl.float32)
    for first in range(0, VOCABULARY, BLOCK):
        token, value = _load(source, first, VOCABULARY, BLOCK)
        key = _key(value, KEY_BITS)
        lowest = border.to(tl.uint32)
        allowed = (key > lowest) | ((key == lowest) & (token < tie_end))
        allowed = allowed & (token < VOCABULARY)
        near = tl.where(allowed, _scale(value, highest, temperature), float("-inf"))
        if tl.max(near, axis=0) + LARGEST_NOISE >= estimate - MARGIN:
            word = _random_words(seed, position, first, BLOCK)
            near += _estimate_noise(word)
            estimate = tl.maximum(estimate, tl.max(near, axis=0))
            if tl.max(near, axis=0) >= estimate - MARGIN:
                scaled = (value.to(tl.float64) - highest.to(tl.float64)) / temperature
                uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
                score = scaled - tl.log(-tl.log(uniform))
                score = tl.where(near >= estimate - MARGIN, score, float("-inf"))
                top = tl.max(score, axis=0)
                if top > best:
                    best = top
                    winner = tl.min(tl.where(score == top, token, NO_TOKEN), axis=0)
    return winner

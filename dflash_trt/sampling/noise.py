"""Counter-based Gumbel noise: Philox4x32-10 of (seed, absolute position, token id).

This is the definition that kernels repeat (all words are unsigned 32-bit):

    key     = (seed mod 2^32, seed div 2^32)
    counter = (token id div 4, position mod 2^32, position div 2^32, TARGET_STREAM)
    x       = word (token id mod 4) of philox4x32_10(counter, key)
    u       = (x + 0.5) * 2^-32            exact in float64, strictly inside (0, 1)
    noise   = -log(-log(u))                float64

In float32 u could round to 1, and two `log`s would disagree once in about 10^5 draws.
Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

WordArray = npt.NDArray[np.uint64]
Words = tuple[WordArray, WordArray, WordArray, WordArray]

TARGET_STREAM = 0
"""Last counter word of the target's draws; another kind of draw would take another stream."""

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_PART = 8192
"""Words that are drawn at once: what they need fits a core's cache."""

LARGEST_NOISE = float(-np.log(-np.log(1.0 - 2.0**-33)))
SMALLEST_NOISE = float(-np.log(-np.log(2.0**-33)))


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds of Philox4x32 over counter words that broadcast against each other.

    Words are 32-bit values held in uint64, so that a product of two fits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIERS[0]
        product_1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product_1 >> _WORD_BITS) ^ c1 ^ np.uint64(k0),
            product_1 & _LOW,
            (product_0 >> _WORD_BITS) ^ c3 ^ np.uint64(k1),
            product_0 & _LOW,
        )
        k0 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF
        k1 = (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def draw_gumbel(
    seed: int, position: int, token_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Noise [n] of `token_ids` [n] at one absolute position (0-based in prompt + output)."""
    word = _draw_words(seed, position, token_ids)
    uniform = (word.astype(np.float64) + 0.5) * 2.0**-32
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def find_lucky(
    seed: int, position: int, token_ids: npt.NDArray[np.int64], least: float
) -> npt.NDArray[np.int64]:
    """Those of ascending `token_ids` [n] whose noise is at least `least`, ascending.

    Perhaps also others from the first of them to the last, and a few whose noise is a little less.
    Noise grows with its word, so that words are compared and no logarithm is taken.
    """
    # Two steps of the word, for what rounding does to the bound.
    bound = np.uint64(max(math.exp(-math.exp(-least)) * 2.0**32 - 2.5, 0.0))
    if 2 * len(token_ids) > token_ids[-1] - token_ids[0]:
        return _find_between(seed, position, int(token_ids[0]), int(token_ids[-1]), bound)
    kept = [
        part[_draw_words(seed, position, part) >= bound]
        for part in (token_ids[i : i + _PART] for i in range(0, len(token_ids), _PART))
    ]
    return np.concatenate(kept)


def _find_between(
    seed: int, position: int, first: int, last: int, bound: np.uint64
) -> npt.NDArray[np.int64]:
    """Ascending ids from `first` to `last` whose word is at least `bound`."""
    kept = []
    for start in range(first >> 2, (last >> 2) + 1, _PART):
        quads = np.arange(start, min(start + _PART, (last >> 2) + 1), dtype=np.uint64)
        for place, words in enumerate(_draw_quads(seed, position, quads)):
            kept.append(np.flatnonzero(words >= bound) + start << 2 | place)
    ids = np.sort(np.concatenate(kept))
    return ids[np.searchsorted(ids, first) : np.searchsorted(ids, last, side="right")]


def _draw_quads(seed: int, position: int, quads: WordArray) -> Words:
    """The words [n] of the first, second, third and fourth token of each four."""
    return philox4x32(
        (
            quads,
            np.array([position & 0xFFFFFFFF], dtype=np.uint64),
            np.array([position >> 32], dtype=np.uint64),
            np.array([TARGET_STREAM], dtype=np.uint64),
        ),
        (seed & 0xFFFFFFFF, seed >> 32),
    )


def _draw_words(seed: int, position: int, token_ids: npt.NDArray[np.int64]) -> WordArray:
    """The word [n] of each token."""
    quads = token_ids >> 2
    # Neighbouring ids share a counter: one Philox call serves up to four tokens.
    is_new = np.concatenate((np.ones(1, dtype=np.bool_), quads[1:] != quads[:-1]))
    words = _draw_quads(seed, position, quads[is_new].astype(np.uint64))
    drawn: WordArray = np.stack(words)[token_ids & 3, np.cumsum(is_new) - 1]
    return drawn

"""Counter-based Gumbel noise of (seed, absolute position, token id), drawn by groups of tokens.

This is the definition that kernels repeat. Words are unsigned 64-bit integers and wrap.

    group   = token id div 256, place = token id mod 256
    x, k    = words 2 (group mod 2) and 2 (group mod 2) + 1 of philox4x64_10(counter, key)
              with counter = (1 + group div 2, position, 0, 0) and key = (seed, 0)
    least   = -log(u(x)) / 256             of the exponentials of a whole group, float64
    member  = x mod 256                    the place that has it
    z       = output number `place` (from 0) of SplitMix64 that starts from k
    e       = least at the place `member`, elsewhere least - log(u(z))
    noise   = -log(e)
    u(w)    = (w div 2^32 + 0.5) * 2^-32   exact in float64, strictly inside (0, 1)

Every e is exponential with mean 1 and independent of all others, as if it were drawn alone: the
least of 256 is exponential with mean 1/256, at each place as likely, and by how much another one
exceeds it is exponential with mean 1, for it has no memory. No noise of a group is above
-log(least), so that a draw looks into few groups (sampling/draw.py).

In float32 u could round to 1, and two `log`s would disagree once in about 10^5 draws.
Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_trt.core.arrays import Float64Array, Int64Array

WordArray = npt.NDArray[np.uint64]

GROUP = 256
"""Tokens, by consecutive ids, whose least exponential is drawn for all of them."""

_SHIFT = GROUP.bit_length() - 1
_HALF = np.uint64(32)
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST = np.uint64(31)
_STEPS = np.arange(1, GROUP + 1, dtype=np.uint64) * np.uint64(_GOLDEN)

LARGEST_NOISE = float(-np.log(-np.log(1.0 - 2.0**-33) / GROUP))
SMALLEST_NOISE = float(-np.log(-np.log(2.0**-33) / GROUP - np.log(2.0**-33)))


@dataclass(frozen=True, slots=True, eq=False)
class GroupNoise:
    """Noise of the tokens of some groups in a row, at one position.

    `words` uint64 [n,2] are x and k of the groups from number `first` on.
    """

    words: WordArray
    first: int

    @classmethod
    def draw(cls, seed: int, position: int, first: int, last: int) -> GroupNoise:
        """Of the tokens from `first` to `last`, and of those in a group with them.

        `position` is absolute: 0-based in prompt + output.
        """
        counter, end = first >> _SHIFT + 1, (last >> _SHIFT + 1) + 1
        words = _philox.draw(seed, position, counter, 4 * (end - counter))
        return cls(words.reshape(-1, 2), 2 * counter)

    def least(self) -> Float64Array:
        """The least exponential of each group [n]."""
        return _least(self.words[:, 0])

    def of(self, token_ids: Int64Array) -> Float64Array:
        """Noise [n] of `token_ids` [n]."""
        x, k = self.words[(token_ids >> _SHIFT) - self.first].T
        places = token_ids & GROUP - 1
        more = -np.log(_uniform(_split_mix(k, places)))
        more[(x & np.uint64(GROUP - 1)).astype(np.int64) == places] = 0.0
        more += _least(x)
        noise: Float64Array = np.log(more)
        return np.negative(noise, out=noise)


def draw_gumbel(seed: int, position: int, token_ids: Int64Array) -> Float64Array:
    """Noise [n] of `token_ids` [n], at least one, at one absolute position."""
    first, last = int(token_ids.min()), int(token_ids.max())
    return GroupNoise.draw(seed, position, first, last).of(token_ids)


def draw_at(seed: int, positions: Int64Array, token_ids: Int64Array) -> Float64Array:
    """Noise [n] of `token_ids` [n], at least one, at ascending absolute `positions` [n]."""
    last = int(token_ids.max())
    each, place = np.unique(positions, return_inverse=True)
    drawn = [GroupNoise.draw(seed, position, 0, last).words for position in each.tolist()]
    # As if the vocabulary of one position followed that of another.
    row = len(drawn[0]) * GROUP
    return GroupNoise(np.concatenate(drawn), 0).of(token_ids + place * row)


class _Philox(threading.local):
    """NumPy's generator of one thread, set to a key and a counter for each draw."""

    def __init__(self) -> None:
        self._generator = np.random.Philox(0)
        # Nothing is left of the block before, and NumPy counts before it draws one.
        self._state = self._generator.state | {"buffer_pos": 4, "has_uint32": 0, "uinteger": 0}
        self._key, self._counter = (self._state["state"][name] for name in ("key", "counter"))
        self._key[:], self._counter[:] = 0, 0

    def draw(self, seed: int, position: int, counter: int, count: int) -> WordArray:
        """`count` words of the blocks with the counters behind (`counter`, position, 0, 0)."""
        self._key[0], self._counter[0], self._counter[1] = seed, counter, position
        self._generator.state = self._state
        words: WordArray = self._generator.random_raw(count)
        return words


_philox = _Philox()


def _split_mix(start: WordArray, places: Int64Array) -> WordArray:
    """The outputs [n] of that number (from 0) of SplitMix64 that starts from `start` [n]."""
    z = start + _STEPS[places]
    for shift, factor in _MIX:
        z ^= z >> shift
        z *= factor
    z ^= z >> _LAST
    return z


def _uniform(words: WordArray) -> Float64Array:
    centre: Float64Array = (words >> _HALF).astype(np.float64)
    centre += 0.5
    centre *= 2.0**-32
    return centre


def _least(words: WordArray) -> Float64Array:
    least: Float64Array = np.log(_uniform(words))
    least /= -GROUP
    return least

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

import math
import sys
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_trt.core.arrays import Float64Array, Int64Array

WordArray = npt.NDArray[np.uint64]

GROUP = 256
"""Tokens, by consecutive ids, whose least exponential is drawn for all of them."""

# Operands of NumPy's operations: made once, since a number of Python takes as long as the rest.
_SHIFT = np.array(GROUP.bit_length() - 1, np.int64)
_PLACE = np.array(GROUP - 1, np.uint64)
_GOLDEN, _MIX_0, _MIX_1 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 2**64 - 1
_STEPS = np.arange(1, GROUP + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
_MIX = [
    (np.array(shift, np.uint64), np.array(factor, np.uint64))
    for shift, factor in ((30, _MIX_0), (27, _MIX_1))
]
_LAST = np.array(31, np.uint64)
_HALF, _STEP, _LEAST = np.array(0.5), np.array(2.0**-32), np.array(-float(GROUP))
_UPPER = 1 if sys.byteorder == "little" else 0

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
        counter, end = first // (2 * GROUP), last // (2 * GROUP) + 1
        words = _philox.draw(seed, position, counter, 4 * (end - counter))
        return cls(words.reshape(-1, 2), 2 * counter)

    def least(self) -> Float64Array:
        """The least exponential of each group [n]."""
        return _least(self.words[:, 0])

    def of(self, token_ids: Int64Array, least: Float64Array | None = None) -> Float64Array:
        """Noise [n] of `token_ids` [n]; `least` of all groups where it is known already."""
        groups = np.right_shift(token_ids, _SHIFT)
        if self.first:
            groups -= self.first
        places = np.bitwise_and(token_ids.view(np.uint64), _PLACE)
        x, k = self.words[:, 0][groups], self.words[:, 1][groups]
        more = _log_uniform(_split_mix(k, places))
        more[np.bitwise_and(x, _PLACE) == places] = 0.0
        noise: Float64Array = np.subtract(
            _least(x) if least is None else least[groups], more, out=more
        )
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
        return noise

    def about(self, token_id: int) -> float:
        """Noise of one token, but for rounding: in less time than an array of one takes."""
        group, place = token_id // GROUP - self.first, token_id % GROUP
        x, k = self.words[group].tolist()
        exponential = -math.log(((x >> 32) + 0.5) * 2.0**-32) / GROUP
        if x % GROUP != place:
            z = k + (place + 1) * _GOLDEN & _WORD
            z = (z ^ z >> 30) * _MIX_0 & _WORD
            z = (z ^ z >> 27) * _MIX_1 & _WORD
            exponential -= math.log(((z ^ z >> 31) >> 32) * 2.0**-32 + 2.0**-33)
        return -math.log(exponential)


def draw_gumbel(seed: int, position: int, token_ids: Int64Array) -> Float64Array:
    """Noise [n] of `token_ids` [n], at least one, at one absolute position."""
    first, last = int(token_ids.min()), int(token_ids.max())
    return GroupNoise.draw(seed, position, first, last).of(token_ids)


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


def _split_mix(start: WordArray, places: WordArray) -> WordArray:
    z = _STEPS[places]
    z += start
    for shift, factor in _MIX:
        z ^= np.right_shift(z, shift)
        z *= factor
    z ^= np.right_shift(z, _LAST)
    return z


def _log_uniform(words: WordArray) -> Float64Array:
    uniform: Float64Array = words.view(np.uint32)[_UPPER::2].astype(np.float64)
    uniform += _HALF
    uniform *= _STEP
    np.log(uniform, out=uniform)
    return uniform


def _least(words: WordArray) -> Float64Array:
    least = _log_uniform(np.ascontiguousarray(words))
    least /= _LEAST
    return least

"""A row of logits, and where its high ones are: found once, so that few tokens are looked at.

A vocabulary has 150,000 tokens and more, of which a draw concerns a few hundred. `peaks` are the
maxima of the groups of tokens whose noise has a bound (sampling/noise.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dflash_trt.core.arrays import FloatArray, Int64Array
from dflash_trt.sampling.noise import GROUP

_MANY = 4  # groups: beyond a quarter of them, a look at the whole row is cheaper
_SHIFT = np.array(GROUP.bit_length() - 1, np.int64)
_PLACE = np.array(GROUP - 1, np.int64)
_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True, eq=False)
class LogitRow:
    """Logits [V], one per token id; `highest` is NaN where one of them is."""

    logits: FloatArray
    peaks: FloatArray
    highest: float

    @classmethod
    def read(cls, logits: FloatArray) -> LogitRow:
        """The row of `logits` [V], of which it keeps a view."""
        peaks: FloatArray = np.maximum.reduceat(logits, _starts(len(logits)))
        return cls(logits, peaks, float(peaks[peaks.argmax()]))

    def likeliest(self) -> int:
        """The token of the highest logit, of equals the lowest id."""
        first = int(self.peaks.argmax()) * GROUP
        return first + int(self.logits[first : first + GROUP].argmax())

    def open(self, groups: Int64Array) -> FloatArray:
        """Logits [n,GROUP] of ascending `groups` [n]; past the vocabulary, minus infinity."""
        whole = len(self.logits) // GROUP
        table = self.logits[: whole * GROUP].reshape(-1, GROUP)
        if not len(groups) or groups[-1] < whole:
            return table.take(groups, axis=0)
        last = np.full((1, GROUP), -np.inf, np.float32)
        last[0, : len(self.logits) - whole * GROUP] = self.logits[whole * GROUP :]
        return np.concatenate((table.take(groups[:-1], axis=0), last))

    def reaching(self, least: float) -> Int64Array:
        """Ascending ids of all tokens whose logit is at least `least`, and of few below it."""
        bound = np.nextafter(np.float32(max(least, _LOWEST)), np.float32(_LOWEST))
        groups = np.flatnonzero(self.peaks >= bound)
        if _MANY * len(groups) > len(self.peaks):
            return np.flatnonzero(self.logits >= bound)
        return ids_in(groups, self.open(groups) >= bound)

    def top(self, count: int) -> Int64Array:
        """Ascending ids of `count` highest tokens and of all that reach the least of these.

        Perhaps of some more; of any two tokens, the higher one is there if the other is.
        """
        if count >= len(self.logits):
            return np.arange(len(self.logits), dtype=np.int64)
        # So many groups have a token that high.
        high = self.peaks if count <= len(self.peaks) else self.logits
        return self.reaching(float(np.partition(high, -count)[-count]))


def ids_in(groups: Int64Array, flags: npt.NDArray[np.bool_]) -> Int64Array:
    """The tokens of `groups` [n] that have a flag of [n,GROUP]."""
    found: Int64Array = flags.ravel().nonzero()[0]
    ids: Int64Array = np.left_shift(groups, _SHIFT)[np.right_shift(found, _SHIFT)]
    ids += np.bitwise_and(found, _PLACE)
    return ids


@lru_cache(maxsize=16)
def _starts(vocab_size: int) -> Int64Array:
    return np.arange(0, vocab_size, GROUP)

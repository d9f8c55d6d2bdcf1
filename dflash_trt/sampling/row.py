"""A row of logits, and where its high ones are: found once, so that few tokens are looked at.

A vocabulary has 150,000 tokens and more, of which a draw concerns a few hundred. `peaks` are the
maxima of the groups of tokens whose noise has a bound (sampling/noise.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dflash_trt.core.arrays import FloatArray, Int64Array
from dflash_trt.sampling.noise import GROUP

_MANY = 4  # groups: beyond a quarter of them, a look at the whole row is cheaper
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
        return cls(logits, peaks, float(peaks.max()))

    def open(self, groups: Int64Array) -> tuple[Int64Array, FloatArray]:
        """Ids [n,GROUP] and logits [n,GROUP] of the tokens of `groups` [n], by their numbers.

        Ids past the vocabulary have minus infinity.
        """
        ids = (groups * GROUP)[:, None] + np.arange(GROUP)
        if len(groups) and groups.max() < len(self.logits) // GROUP:
            whole = len(self.logits) // GROUP * GROUP
            return ids, self.logits[:whole].reshape(-1, GROUP)[groups]
        logits = self.logits.take(ids, mode="clip")
        logits[ids >= len(self.logits)] = -np.inf
        return ids, logits

    def reaching(self, least: float) -> Int64Array:
        """Ascending ids of all tokens whose logit is at least `least`, and of few below it."""
        bound = np.nextafter(np.float32(max(least, _LOWEST)), np.float32(_LOWEST))
        groups = np.flatnonzero(self.peaks >= bound)
        if _MANY * len(groups) > len(self.peaks):
            return np.flatnonzero(self.logits >= bound)
        ids, logits = self.open(groups)
        reached: Int64Array = ids[logits >= bound]
        return reached

    def top(self, count: int) -> Int64Array:
        """Ascending ids of `count` highest tokens and of all that reach the least of these.

        Perhaps of some more; of any two tokens, the higher one is there if the other is.
        """
        if count >= len(self.logits):
            return np.arange(len(self.logits), dtype=np.int64)
        # So many groups have a token that high.
        high = self.peaks if count <= len(self.peaks) else self.logits
        return self.reaching(float(np.partition(high, -count)[-count]))


@lru_cache(maxsize=16)
def _starts(vocab_size: int) -> Int64Array:
    return np.arange(0, vocab_size, GROUP)

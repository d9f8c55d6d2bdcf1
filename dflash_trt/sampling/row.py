"""A row of logits, and where its high ones are: found once, so that few tokens are looked at.

A vocabulary has 150,000 tokens and more, of which a draw concerns a few hundred. The row is laid
out as 64 stretches below each other, and `peaks` are the maxima of the columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_trt.core.arrays import FloatArray, Int64Array

_STRETCHES = 64
_SHORTEST = 4096  # a row of fewer tokens is its own peaks
_MANY = 4  # columns: beyond a quarter of them, a look at the whole row is cheaper


@dataclass(frozen=True, slots=True, eq=False)
class LogitRow:
    """Logits [V], one per token id; `highest` is NaN where one of them is."""

    logits: FloatArray
    peaks: FloatArray
    highest: float

    @classmethod
    def read(cls, logits: FloatArray) -> LogitRow:
        """The row of `logits` [V], of which it keeps a view."""
        peaks = logits
        if len(logits) >= _SHORTEST:
            width = len(logits) // _STRETCHES
            whole = width * _STRETCHES
            peaks = logits[:whole].reshape(_STRETCHES, width).max(axis=0)
            rest = logits[whole:]
            np.maximum(peaks[: len(rest)], rest, out=peaks[: len(rest)])
        return cls(logits, peaks, float(peaks.max()))

    def reaching(self, least: float) -> Int64Array:
        """Ascending ids of all tokens whose logit is at least `least`, and of few below it."""
        lowest = float(np.finfo(np.float32).min)
        bound = np.nextafter(np.float32(max(least, lowest)), np.float32(lowest))
        if len(self.peaks) == len(self.logits):
            return np.flatnonzero(self.logits >= bound)
        columns = np.flatnonzero(self.peaks >= bound)
        width = len(self.peaks)
        if _MANY * len(columns) > width:
            return np.flatnonzero(self.logits >= bound)
        whole = width * _STRETCHES
        picked = self.logits[:whole].reshape(_STRETCHES, width)[:, columns]
        found = np.flatnonzero(picked >= bound)
        stretch = found // max(len(columns), 1)
        ids = stretch * width + columns[found - stretch * len(columns)]
        rest = np.flatnonzero(self.logits[whole:] >= bound)
        return np.concatenate((ids, rest + whole)) if rest.size else ids

    def top(self, count: int) -> Int64Array:
        """Ascending ids of `count` highest tokens and of all that reach the least of these.

        Perhaps of some more; of any two tokens, the higher one is there if the other is.
        """
        if count >= len(self.peaks):
            return np.arange(len(self.logits), dtype=np.int64)
        # So many columns have a token that high.
        return self.reaching(float(np.partition(self.peaks, -count)[-count]))

"""Drafts drawn with the noise of the target's own draw (a Gumbel coupling).

Where the target draws argmax(l/T + g), the draft of the same position may take argmax(s·d/T + g)
with its own logits d and the same noise g: two distributions that are alike then agree more often
than the likeliest token agrees with a draw. The sharpness s belongs to the place in the block:
1 is a plain coupling, LIKELIEST is the likeliest token. What comes out never depends on it.
Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding",
2024.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_trt.core.arrays import FloatArray, Int64Array
from dflash_trt.sampling.noise import draw_at
from dflash_trt.sampling.params import SamplingParams

LIKELIEST = 1e6
"""The sharpness from which on noise decides nothing but ties."""

# A token so many units behind the likeliest one would need noise that comes once in 3,000 draws.
_REACH = 8.0


@dataclass(frozen=True, slots=True, eq=False)
class DraftCoupling:
    """The sharpness of each draft of a block; `token_ids` [K] where it chooses among some."""

    sharpness: tuple[float, ...]
    token_ids: Int64Array | None = None

    def choose(
        self, logits: FloatArray, likeliest: Int64Array, sampling: SamplingParams, position: int
    ) -> Int64Array:
        """The drafts [n] of logits [n,V], or [n,K], of which the first is for absolute `position`.

        `likeliest` [n] are the highest of each row; `sampling` must not be greedy. Tokens that
        would need rare noise are left out, which costs a draft now and then.
        """
        sharpness, highest = np.asarray(self.sharpness[: len(logits)]), logits.max(axis=1)
        # A damaged draft's rows stay as they are: what they say is checked like any other draft.
        (slots,) = np.nonzero((sharpness < LIKELIEST) & np.isfinite(highest))
        if not len(slots):
            return likeliest.copy()
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return self._draw(logits, likeliest, highest, slots, sampling, position)

    def _draw(
        self,
        logits: FloatArray,
        likeliest: Int64Array,
        highest: FloatArray,
        slots: Int64Array,
        sampling: SamplingParams,
        position: int,
    ) -> Int64Array:
        scale = np.asarray(self.sharpness[: len(logits)], np.float64) / sampling.temperature
        least = (highest - _REACH / scale).astype(np.float32)
        near = [np.flatnonzero(logits[slot] >= least[slot]) for slot in slots]
        counts = [len(some) for some in near]
        rows, columns = np.repeat(slots, counts), np.concatenate(near)
        ids = columns if self.token_ids is None else self.token_ids[columns]
        score = (logits[rows, columns].astype(np.float64) - highest[rows]) * scale[rows]
        score += draw_at(sampling.seed, position + rows, ids)
        found, ends = likeliest.copy(), np.cumsum(counts)
        for slot, end, count in zip(slots, ends, counts, strict=True):
            found[slot] = ids[end - count + np.argmax(score[end - count : end])]
        return found

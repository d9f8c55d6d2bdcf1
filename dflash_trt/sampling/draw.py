"""Which token of a row noise lifts above all others: the whole of it, or what is ranked first.

No token gets ahead of its logit and the bound of its group's noise, so that only a few hundred
tokens need noise of their own. Bounds are computed as scores are, in the same order and in
float64; what roundings of the last places do to them is far below `_SLACK`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dflash_trt.core.arrays import Float64Array, FloatArray, Int64Array
from dflash_trt.sampling.noise import LARGEST_NOISE, SMALLEST_NOISE, GroupNoise, draw_gumbel
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.sampling.row import LogitRow, ids_in

_FIRST_GROUPS = 24
"""Groups, by the bounds of their scores, that are looked into first."""
_SLACK = 1e-6
_NOISE_SPAN = LARGEST_NOISE - SMALLEST_NOISE + _SLACK
_LEAST_TEMPERATURE = 1e-200
"""From here on nothing that is divided by it overflows."""
_BODY = 3.0
"""Behind the highest, of logits over the temperature: what is weighed of a row at first."""
_SUM_ERROR = 3e-5
"""Relative, of the weight of a row in float32, and of what is left out of it."""
_EXACT_ERROR = 1e-9


def scale(logits: FloatArray, highest: float, temperature: float) -> Float64Array:
    """`logits`, in float64, divided by the temperature; the highest of them becomes 0."""
    scaled = logits.astype(np.float64)
    scaled -= highest
    if temperature < _LEAST_TEMPERATURE:
        # The maximum is 0, so this sends only the others towards -inf.
        with np.errstate(over="ignore"):
            scaled /= temperature
    else:
        scaled /= temperature
    return scaled


def draw_listed(
    ids: Int64Array, scaled: Float64Array, position: int, params: SamplingParams
) -> int:
    """The token of ascending `ids` [n] whose `scaled` logit and noise are the most together."""
    # Noise is bounded, so a token this far behind cannot win: the same answer, fewer draws.
    reachable = (scaled >= scaled.max() - _NOISE_SPAN).nonzero()[0]
    ids, scaled = ids[reachable], scaled[reachable]
    if len(ids) == 1:
        return int(ids[0])
    scaled += draw_gumbel(params.seed, position, ids)
    return int(ids[scaled.argmax()])


class Draw:
    """A draw from a whole row."""

    def __init__(self, row: LogitRow, position: int, params: SamplingParams) -> None:
        self._row, self._params = row, params
        self._noise = GroupNoise.draw(params.seed, position, 0, len(row.logits) - 1)
        self._least = self._noise.least()[: len(row.peaks)]
        self._bounds = np.log(self._least)
        self._reach = scale(row.peaks, row.highest, params.temperature)
        self._reach -= self._bounds
        self._weight: float | None = None

    def winner(self, last: int | None = None) -> int:
        """The token of the highest score, of equals the lowest id; or of those before `last`.

        These are ranked by logit, the lower id first among equals; there must be one.
        """
        reach, row = self._reach, self._row
        least = self._noise.about(row.likeliest()) - _SLACK
        if last is not None:
            reach = np.where(row.peaks >= row.logits[last], reach, -np.inf)
        groups = (reach >= least).nonzero()[0]
        if len(groups) > _FIRST_GROUPS:
            some = reach[groups]
            order = some.argpartition(len(some) - _FIRST_GROUPS)[-_FIRST_GROUPS:]
            groups, least = np.sort(groups[order]), float(some[order[0]])
        while True:
            ids = self._find(groups, least - _SLACK, last)
            if ids.size:
                scores = scale(row.logits[ids], row.highest, self._params.temperature)
                scores += self._noise.of(ids, self._least)
                winner = int(scores.argmax())
                if scores[winner] >= least + _SLACK:
                    return int(ids[winner])
                least = float(scores[winner]) - 2 * _SLACK
            else:
                least = SMALLEST_NOISE - _SLACK
            groups = (reach >= least - _SLACK).nonzero()[0]

    def winner_of_nucleus(self) -> int | None:
        """That of the likeliest tokens whose probability reaches `top_p`.

        The nucleus is what is ranked first: a winner in it is its winner, and if one is not, then
        it is among what is ranked before that. None where rounding leaves open what is in it.
        """
        token = self.winner()
        while not (is_in := self._is_in_nucleus(token)):
            if is_in is None:
                return None
            token = self.winner(token)
        return token

    def _find(self, groups: Int64Array, least: float, last: int | None) -> Int64Array:
        """Ascending ids of what may come in ascending `groups` and may reach a score of `least`."""
        temperature = self._params.temperature
        wanted = self._bounds[groups]
        wanted += least
        wanted *= temperature
        highest = self._row.highest
        wanted += highest - 1e-5 * (1.0 + abs(highest) + 64.0 * temperature)
        ids = ids_in(groups, self._row.open(groups) >= wanted.astype(np.float32)[:, None])
        return ids if last is None else ids[self._is_before(ids, last)]

    def _is_before(self, ids: Int64Array, last: int) -> npt.NDArray[np.bool_]:
        logits, border = self._row.logits[ids], self._row.logits[last]
        before: npt.NDArray[np.bool_] = (logits > border) | (logits == border) & (ids < last)
        return before

    def _is_in_nucleus(self, token: int) -> bool | None:
        """Whether the tokens before `token` weigh less than top_p of all; None: nobody knows."""
        row, params = self._row, self._params
        if token == row.likeliest():
            return True
        body = row.highest - _BODY * params.temperature
        ids = row.reaching(min(float(row.logits[token]), body))
        weights = np.exp(scale(row.logits[ids], row.highest, params.temperature))
        before = float(weights[self._is_before(ids, token)].sum())
        if before < params.top_p * float(weights.sum()) * (1 - _EXACT_ERROR):
            return True
        if self._weight is None:
            self._weight = _weigh(row.logits, row.highest, params.temperature)
        wanted = params.top_p * self._weight
        return None if abs(before - wanted) <= _SUM_ERROR * wanted else before < wanted


def _weigh(logits: FloatArray, highest: float, temperature: float) -> float:
    with np.errstate(over="ignore"):
        behind = logits - np.float32(highest)
        behind *= np.float32(1 / temperature)
    return float(np.exp(behind, out=behind).sum())

"""The target's choice per logit row: argmax, or a draw that noise fixes in advance.

A sampled token is the argmax of `logit / temperature + noise` over what is allowed and what min-p,
top-k and top-p leave (the Gumbel-max trick). The noise depends on seed, position and token id
alone, so that a draw is the same with and without speculation: verifying a draft by comparing it
with this choice is lossless. Tokens that cannot win any more are not looked at, which changes no
choice: noise is bounded, and so is what the tail of a row weighs.
"""

from __future__ import annotations

import math

import numpy as np

from dflash_trt.core.arrays import Float64Array, FloatArray, Int64Array
from dflash_trt.core.masks import Allowed
from dflash_trt.errors import DflashError
from dflash_trt.sampling.draw import Draw, draw_listed, scale
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.sampling.row import LogitRow

_USUAL = 1e-3, 1e3
"""Temperatures between which float32 is exact enough for bounds and a row's weight."""
_MOST_LOGIT = 1e30


def choose_tokens(logits: FloatArray, positions: Int64Array, params: SamplingParams) -> Int64Array:
    """The target's token for each row of `logits` [R,V]; int64 [R].

    `positions` [R] are the absolute positions (0-based in prompt + output) that the chosen
    tokens will take. Row r of the result depends on row r of the arguments and `params` alone.

    Raises:
        DflashError: a row holds NaN or +inf, or nothing but -inf.
    """
    pairs = zip(logits, positions.tolist(), strict=True)
    chosen = [choose_token(row, position, params) for row, position in pairs]
    return np.array(chosen, dtype=np.int64)


def choose_token(
    logits: FloatArray, position: int, params: SamplingParams, allowed: Allowed | None = None
) -> int:
    """The target's token of one row [V], among those that are `allowed`.

    Raises:
        DflashError: the row holds NaN or +inf, or nothing but -inf among what is allowed.
    """
    if params.greedy:
        winner = int(np.argmax(logits))
        _check(float(logits[winner]), position)
        if allowed is None or allowed.allows(winner):
            return winner
        logits = allowed.tokens().apply(logits)
        winner = int(np.argmax(logits))
        _check(float(logits[winner]), position)
        return winner
    if allowed is not None and not params.narrows:
        # What wins among all tokens wins among those that may come, if it may, and if the same one
        # is the highest: so that nobody has to say it of all.
        row = _read(logits, position)
        if allowed.allows(row.likeliest()):
            winner = _draw(row, position, params)
            if allowed.allows(winner):
                return winner
    if allowed is not None:
        logits = allowed.tokens().apply(logits)
    return _draw(_read(logits, position), position, params)


def choose_candidate(
    token_ids: Int64Array, logits: FloatArray, position: int, params: SamplingParams
) -> int | None:
    """The target's token of a row known by its highest logits: what choose_tokens would say.

    `token_ids` and `logits` [K] are the row's candidates, in any order; `params.top_k` is at most
    K. None when they cannot tell: a token that was left out ties with the last one kept.

    Raises:
        DflashError: a candidate is NaN or +inf, or all are -inf.
    """
    (highest,) = find_highest(logits[None], np.array([position], dtype=np.int64))
    order = np.lexsort((token_ids, -logits))[: params.top_k]
    if logits[order[-1]] == logits.min():
        return None
    kept = order[np.argsort(token_ids[order])]
    return _draw_listed(token_ids[kept], logits[kept], float(highest), position, params)


def process(logits: FloatArray, params: SamplingParams, allowed: Allowed | None) -> FloatArray:
    """A copy of the row [V] as `choose_token` draws from it: what cannot come is minus infinity.

    Divided by the temperature; of a greedy request only masked.
    """
    row = logits.copy() if allowed is None else allowed.tokens().apply(logits)
    if params.greedy:
        return row
    scaled = scale(row, float(row.max()), params.temperature)
    ids = np.arange(len(row), dtype=np.int64)
    ids = _narrow(ids, row, scaled, params)
    processed = np.full(len(row), -np.inf, np.float32)
    processed[ids] = scaled[ids]
    return processed


def find_highest(logits: FloatArray, positions: Int64Array) -> FloatArray:
    """The highest logit [R] of each row [R,V].

    Raises:
        DflashError: a row holds NaN or +inf, or nothing but -inf.
    """
    highest: FloatArray = logits.max(axis=1)
    finite = np.isfinite(highest)
    if not finite.all():
        raise not_finite(int(positions[int(np.flatnonzero(~finite)[0])]))
    return highest


def not_finite(position: int) -> DflashError:
    """The error of a row from which no token can be chosen for `position`."""
    return DflashError(
        f"the target's logits for position {position} are not finite",
        fix="the checkpoint's weights are damaged, or overflow float32",
    )


def _check(highest: float, position: int) -> None:
    if not math.isfinite(highest):
        raise not_finite(position)


def _read(logits: FloatArray, position: int) -> LogitRow:
    row = LogitRow.read(logits)
    _check(row.highest, position)
    return row


def _draw(row: LogitRow, position: int, params: SamplingParams) -> int:
    """The Gumbel-max winner of a row; of equals the lowest id."""
    logits, highest, temperature = row.logits, row.highest, params.temperature
    if params.top_k is not None:
        ids = row.top(params.top_k)
    elif params.min_p:
        ids = row.reaching(_behind(highest, math.log(params.min_p) - 1e-3, temperature))
    else:
        if _USUAL[0] < temperature < _USUAL[1] and abs(highest) < _MOST_LOGIT:
            draw = Draw(row, position, params)
            winner = draw.winner() if params.top_p == 1 else draw.winner_of_nucleus()
            if winner is not None:
                return winner
        ids = np.arange(len(logits), dtype=np.int64)
    return _draw_listed(ids, logits[ids], highest, position, params)


def _draw_listed(
    ids: Int64Array, logits: FloatArray, highest: float, position: int, params: SamplingParams
) -> int:
    """The winner of what min-p, top-k and top-p leave of ascending `ids` [n], by their `logits`."""
    scaled = scale(logits, highest, params.temperature)
    kept = _narrow(np.arange(len(ids), dtype=np.int64), logits, scaled, params)
    return draw_listed(ids[kept], scaled[kept], position, params)


def _narrow(
    kept: Int64Array, logits: FloatArray, scaled: Float64Array, params: SamplingParams
) -> Int64Array:
    """What min-p, top-k and top-p leave of all indices `kept` [n] of `logits` and `scaled` [n]."""
    if params.top_k is not None:
        kept = _keep_top_k(logits, params.top_k)
    if params.min_p:
        kept = kept[scaled[kept] >= math.log(params.min_p)]
    if params.top_p < 1:
        kept = kept[_keep_top_p(logits[kept], scaled[kept], params.top_p)]
    return kept


def _behind(highest: float, scaled: float, temperature: float) -> float:
    """A logit that is a little less than the one that is `scaled` (below 0) behind the highest."""
    return highest + scaled * temperature - 1e-5 * max(1.0, abs(highest), abs(scaled * temperature))


def _keep_top_k(logits: FloatArray, top_k: int) -> Int64Array:
    """Ascending indices of the `top_k` highest of `logits` [n], exactly that many if there are."""
    count = logits.shape[0]
    if top_k >= count:
        return np.arange(count, dtype=np.int64)
    threshold = np.partition(logits, count - top_k)[count - top_k]
    above = np.flatnonzero(logits > threshold)
    ties = np.flatnonzero(logits == threshold)[: top_k - above.size]
    return np.sort(np.concatenate((above, ties)))


def _keep_top_p(logits: FloatArray, scaled: Float64Array, top_p: float) -> Int64Array:
    """Ascending indices of the nucleus of `scaled` [n], made from `logits` [n]; never empty.

    A token stays when the probability of all tokens ranked before it is below `top_p`. Ranked
    by logit, not by what scaling left of it: rounding makes ties of neighbours.
    """
    ranked = np.argsort(-logits, kind="stable")
    reached = np.cumsum(np.exp(scaled[ranked]))
    before = np.concatenate((np.zeros(1), reached[:-1]))
    return np.sort(ranked[before < top_p * reached[-1]])

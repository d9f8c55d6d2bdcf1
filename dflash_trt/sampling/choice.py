"""The target's choice per logit row: argmax, or a draw that noise fixes in advance.

A sampled token is the argmax of `logit / temperature + noise` over what top-k and top-p leave (the
Gumbel-max trick). The noise depends on seed, position and token id alone, so that a draw is the
same with and without speculation: verifying a draft by comparing it with this choice is lossless.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dflash_trt.core.arrays import FloatArray, Int64Array
from dflash_trt.errors import DflashError
from dflash_trt.sampling.noise import LARGEST_NOISE, SMALLEST_NOISE, draw_gumbel
from dflash_trt.sampling.params import SamplingParams

Float64Array = npt.NDArray[np.float64]

_NOISE_SPAN = LARGEST_NOISE - SMALLEST_NOISE + 1e-6


def choose_tokens(logits: FloatArray, positions: Int64Array, params: SamplingParams) -> Int64Array:
    """The target's token for each row of `logits` [R,V]; int64 [R].

    `positions` [R] are the absolute positions (0-based in prompt + output) that the chosen
    tokens will take. Row r of the result depends on row r of the arguments and `params` alone.

    Raises:
        DflashError: a row holds NaN or +inf, or nothing but -inf.
    """
    highest = find_highest(logits, positions)
    if params.greedy:
        winners: Int64Array = np.argmax(logits, axis=1).astype(np.int64, copy=False)
        return winners
    chosen = [
        _draw_token(allowed, row[allowed], float(top), int(position), params)
        for row, top, position in zip(logits, highest, positions, strict=True)
        for allowed in (_keep_top_k(row, params.top_k),)
    ]
    return np.array(chosen, dtype=np.int64)


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
    return _draw_token(token_ids[kept], logits[kept], float(highest), position, params)


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


def _draw_token(
    allowed: Int64Array, logits: FloatArray, highest: float, position: int, params: SamplingParams
) -> int:
    """The Gumbel-max winner of what top-k left of a row; equal scores go to the lower token id.

    `allowed` [n] ascending ids, `logits` [n] theirs.
    """
    # The maximum becomes 0, so a tiny temperature sends only the others towards -inf.
    with np.errstate(over="ignore"):
        scaled = (logits.astype(np.float64) - highest) / params.temperature
    if params.top_p < 1:
        kept = _keep_top_p(logits, scaled, params.top_p)
        allowed, scaled = allowed[kept], scaled[kept]
    # Noise is bounded, so a token this far behind cannot win: the same answer, fewer draws.
    reachable = np.flatnonzero(scaled >= -_NOISE_SPAN)
    allowed, scaled = allowed[reachable], scaled[reachable]
    return int(allowed[np.argmax(scaled + draw_gumbel(params.seed, position, allowed))])


def _keep_top_k(logits: FloatArray, top_k: int | None) -> Int64Array:
    """Ascending ids of the `top_k` highest of `logits` [V], exactly that many."""
    vocab_size = logits.shape[0]
    if top_k is None or top_k >= vocab_size:
        return np.arange(vocab_size, dtype=np.int64)
    threshold = np.partition(logits, vocab_size - top_k)[vocab_size - top_k]
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

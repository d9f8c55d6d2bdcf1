"""Who chooses a request's tokens from an executor's scores, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from dflash_trt.backends.base import FloatArray
from dflash_trt.runtime.request import RequestState
from dflash_trt.runtime.scores import RowScores


def make_chooser(state: RequestState, known: RowScores) -> Callable[[int], int]:
    """The target's token by logit row, for rows that continue `state`'s output in order."""
    sampling, first_position = state.request.sampling, state.next_position
    if not state.request.changes_logits:
        return lambda row: known.choose(row, first_position + row, sampling)
    penalties, follower = state.request.penalties, state.follower
    counts = Counter(state.token_ids)

    def change(logits: FloatArray) -> FloatArray:
        changed = penalties.apply(logits, counts, state.request.prompt_ids)
        return changed if follower is None else follower.mask(changed)

    def choose(row: int) -> int:
        token = known.choose_changed(row, first_position + row, sampling, change)
        counts[token] += 1  # the next row continues it, or is never asked for
        if follower is not None:
            follower.take(token)
        return token

    return choose

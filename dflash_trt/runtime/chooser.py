"""Who chooses a request's tokens from its rows of logits, each in the state that its output is in
there. The order of what happens to a row: docs/design/lossless.md."""

from __future__ import annotations

from collections.abc import Callable

from dflash_trt.core.masks import Allowed
from dflash_trt.runtime.logprobs import score_token
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.scores import RowScores
from dflash_trt.runtime.state import RequestState
from dflash_trt.sampling.penalties import PenaltyState
from dflash_trt.sampling.rules import Ruled


def open_penalties(request: Request) -> PenaltyState | None:
    """What penalties know of a request that begins; None where it has none."""
    if request.penalties.is_neutral:
        return None
    return PenaltyState(request.penalties, request.prompt_ids)


def make_chooser(state: RequestState, known: RowScores) -> Callable[[int], int]:
    """The target's token by logit row, for rows that continue `state`'s output in order.

    A row is asked for once, and what is chosen is the output's next token: its state goes on.
    """
    sampling, first_position = state.request.sampling, state.next_position
    request, top = state.request, state.request.logprobs or 0
    is_hosts = request.changes_logits or request.reads_processed
    if not (is_hosts or (known.is_drawn and request.is_hosts)):
        return lambda row: known.choose(row, first_position + row, sampling)
    change = None if state.penalties is None else state.penalties.apply
    output = state.token_ids.copy()

    def choose(row: int) -> int:
        allowed = _find_allowed(state, output)
        token = known.choose_changed(row, first_position + row, sampling, change, allowed)
        if request.reads_processed:
            processed = known.process(row, sampling, change, allowed)
            state.processed.append(score_token(processed, token, top))
        output.append(token)
        if state.penalties is not None:
            state.penalties.take(token)
        if state.follower is not None:
            state.follower.take(token)
        return token

    return choose


def _find_allowed(state: RequestState, output: list[int]) -> Allowed | None:
    """What may come behind `output`; None: anything."""
    if state.mask is None:
        return state.follower
    return Ruled(state.mask, state.request.rules.banned(output), state.follower)

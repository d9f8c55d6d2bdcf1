"""An executor's scores for one sequence's rows, and the tokens chosen from them.

The order of what happens to a row: docs/design/lossless.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_trt.backends.base import (
    ExecutorLimits,
    FloatArray,
    Int64Array,
    Scores,
    SpeculationOutput,
    TargetOutput,
)
from dflash_trt.core.masks import Allowed
from dflash_trt.decoding.logprobs import TokenLogprob, score_token
from dflash_trt.decoding.request import Request, RequestFailedError
from dflash_trt.decoding.state import RequestState
from dflash_trt.errors import DflashError
from dflash_trt.sampling.acceptance import accept_block
from dflash_trt.sampling.choice import (
    choose_candidate,
    choose_token,
    find_highest,
    not_finite,
    process,
)
from dflash_trt.sampling.params import SamplingParams, pack_sampling
from dflash_trt.sampling.penalties import PenaltyState
from dflash_trt.sampling.token_rules import Ruled

# Executors hand out more, so that the k-th logit seldom equals the last candidate's.
MAX_CANDIDATE_TOP_K = 64


@dataclass(slots=True)
class RowScores:
    """The rows of sequence `index` of a call, and their choices.

    With `is_drawn` the executor's choices are the tokens. Valid until its next call.
    """

    output: SpeculationOutput | TargetOutput
    index: int
    choice_ids: list[int]
    is_drawn: bool

    @property
    def logits(self) -> FloatArray | None:
        """[R,V], where they were asked for."""
        return None if (logits := self.output.logits) is None else logits[self.index]

    def choose(self, row: int, position: int, sampling: SamplingParams) -> int:
        """The target's token at `row`, which will stand at absolute `position`."""
        if self.is_drawn or sampling.greedy:
            token = self.choice_ids[row]
            if token < 0:
                raise not_finite(position)
            return token
        if (logits := self.logits) is not None:
            return choose_token(logits[row], position, sampling)
        if (candidates := self.output.candidates) is None:
            raise ValueError("a sampled request needs the executor's logits")
        ids, values = candidates.token_ids, candidates.logits
        candidate = choose_candidate(
            ids[self.index, row], values[self.index, row], position, sampling
        )
        if candidate is not None:
            return candidate
        return choose_token(candidates.read_row(self.index, row), position, sampling)

    def whole(self, row: int) -> FloatArray:
        """All logits [V] of a row, which whoever changes it needs."""
        if (logits := self.logits) is None:
            raise _no_logits("penalties, min_p and grammars")
        whole: FloatArray = logits[row]
        return whole

    def check(self, rows: int, first_position: int) -> None:
        """Raises DflashError when one of the first `rows` rows, where known, is not finite."""
        known, candidates = self.logits, self.output.candidates
        if known is None and candidates is not None:
            known = candidates.logits[self.index]
        if known is not None:
            positions: Int64Array = np.arange(first_position, first_position + rows)
            find_highest(known[:rows], positions)

    def score(self, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
        """Log-probabilities of the tokens chosen from the first rows (see `score_token`)."""
        if (logits := self.logits) is None:
            raise _no_logits("log-probabilities")
        rows = zip(logits, token_ids, strict=False)
        return [score_token(row, token_id, top) for row, token_id in rows]


def needed_scores(limits: ExecutorLimits, request: Request) -> Scores:
    """How much of a row choosing needs: nothing, its candidates (a small top-k), or all of it."""
    sampling = request.sampling
    if request.reads_rows if limits.draws else request.needs_logits:
        return Scores.LOGITS
    if limits.draws or sampling.greedy:
        return Scores.NONE
    is_small = sampling.top_k is not None and sampling.top_k <= MAX_CANDIDATE_TOP_K
    return Scores.CANDIDATES if is_small else Scores.LOGITS


def takes_choices(limits: ExecutorLimits, request: Request) -> bool:
    """Whether its tokens are the executor's choices."""
    return (limits.draws or request.sampling.greedy) and not request.is_hosts


def sampling_input(limits: ExecutorLimits, params: Sequence[SamplingParams]) -> Int64Array | None:
    """Sampling parameters for an executor that draws tokens itself; None for any other."""
    return pack_sampling(params) if limits.draws else None


def open_penalties(request: Request) -> PenaltyState | None:
    """What penalties know of a request that begins; None where it has none."""
    if request.penalties.is_neutral:
        return None
    return PenaltyState(request.penalties, request.prompt_ids)


def make_chooser(state: RequestState, known: RowScores) -> Callable[[int], int]:
    """The target's token by logit row, for rows that continue `state`'s output in order.

    A row is asked for once, and what is chosen is the output's next token: its state goes on.
    """
    request, sampling, first_position = state.request, state.request.sampling, state.next_position
    is_hosts = request.changes_logits or request.reads_processed
    if not (is_hosts or (known.is_drawn and request.is_hosts)):
        return lambda row: known.choose(row, first_position + row, sampling)
    output, top = state.token_ids.copy(), request.logprobs or 0

    def choose(row: int) -> int:
        allowed: Allowed | None = state.follower
        if state.mask is not None:
            banned = request.rules.banned(output)
            if len(output) < request.min_tokens:
                banned |= state.stop_ids
            allowed = Ruled(state.mask, banned, allowed)
        logits = known.whole(row)
        if state.penalties is not None:
            logits = state.penalties.apply(logits)
        token = choose_token(logits, first_position + row, sampling, allowed)
        if request.reads_processed:
            processed = process(logits, sampling, allowed)
            state.processed.append(score_token(processed, token, top))
        output.append(token)
        if state.penalties is not None:
            state.penalties.take(token)
        if state.follower is not None:
            state.follower.take(token)
        return token

    return choose


def settle(
    state: RequestState,
    draft: Sequence[int],
    choices: list[int],
    output: SpeculationOutput | TargetOutput,
    index: int,
    is_drawn: bool,
    records_logits: bool,
) -> tuple[int, int]:
    """Appends what the rows of sequence `index` settle to its output, up to the output's end.

    Returns how many tokens were settled, and how many of them taken.

    Raises:
        RequestFailedError: no token can be chosen, or read.
    """
    has_rows = output.logits is not None or output.candidates is not None
    try:
        if state.takes_choices and not has_rows and min(choices) >= 0:  # as at most steps
            tokens = accept_block(draft, choices.__getitem__)
            return len(tokens), state.append_tokens(tokens)
        known = RowScores(output, index, choices, is_drawn)
        tokens = accept_block(draft, make_chooser(state, known))
        if state.takes_choices:  # choosing looks itself
            known.check(len(tokens), state.next_position)
        taken = state.append_tokens(tokens)
        if records_logits and known.logits is not None:
            state.logits.extend(row.copy() for row in known.logits[:taken])
        if state.request.reads_processed:
            state.logprobs += state.processed[:taken]
            state.processed.clear()
        elif state.request.logprobs is not None:
            state.logprobs += known.score(tokens[:taken], state.request.logprobs)
    except DflashError as error:
        raise RequestFailedError(state.request_id, error) from error
    return len(tokens), taken


def _no_logits(wanted: str) -> DflashError:
    what = f"this back end hands out no logits, which {wanted} need"
    return DflashError(what, where="request", fix="leave them out", usage=True)

"""An executor's scores for one sequence's rows, and the tokens chosen from them.

The order of what happens to a row: docs/design/lossless.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_trt.backends.base import (
    Candidates,
    ExecutorLimits,
    FloatArray,
    Int64Array,
    Scores,
    SpeculationOutput,
    TargetOutput,
)
from dflash_trt.core.masks import Allowed
from dflash_trt.decoding.logprobs import TokenLogprob, score_token
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.state import RequestState
from dflash_trt.errors import DflashError
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
    """The rows of sequence `index` of a call: `logits` [R,V], or candidates, or neither.

    With `is_drawn` the executor's choices are the tokens. Valid until its next call.
    """

    index: int
    choice_ids: list[int]
    logits: FloatArray | None
    candidates: Candidates | None
    is_drawn: bool

    def choose(self, row: int, position: int, sampling: SamplingParams) -> int:
        """The target's token at `row`, which will stand at absolute `position`."""
        if self.is_drawn or sampling.greedy:
            token = self.choice_ids[row]
            if token < 0:
                raise not_finite(position)
            return token
        if self.logits is not None:
            return choose_token(self.logits[row], position, sampling)
        if self.candidates is None:
            raise ValueError("a sampled request needs the executor's logits")
        ids, values = self.candidates.token_ids, self.candidates.logits
        candidate = choose_candidate(
            ids[self.index, row], values[self.index, row], position, sampling
        )
        if candidate is not None:
            return candidate
        return choose_token(self.candidates.read_row(self.index, row), position, sampling)

    def whole(self, row: int) -> FloatArray:
        """All logits [V] of a row, which whoever changes it needs."""
        if self.logits is None:
            raise _no_logits("penalties, min_p and grammars")
        logits: FloatArray = self.logits[row]
        return logits

    def last_row(self) -> RowScores:
        """The last row alone."""
        logits = None if self.logits is None else self.logits[-1:]
        return replace(self, choice_ids=self.choice_ids[-1:], logits=logits)

    def check(self, rows: int, first_position: int) -> None:
        """Raises DflashError when one of the first `rows` rows, where known, is not finite."""
        known = self.logits
        if known is None and self.candidates is not None:
            known = self.candidates.logits[self.index]
        if known is not None:
            positions: Int64Array = np.arange(first_position, first_position + rows)
            find_highest(known[:rows], positions)

    def score(self, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
        """Log-probabilities of the tokens chosen from the first rows (see `score_token`)."""
        if self.logits is None:
            raise _no_logits("log-probabilities")
        rows = zip(self.logits, token_ids, strict=False)
        return [score_token(row, token_id, top) for row, token_id in rows]


def rows_by_sequence(
    output: SpeculationOutput | TargetOutput, *, is_drawn: bool
) -> list[RowScores]:
    """An executor's answer, a RowScores per sequence."""
    return [
        RowScores(
            index,
            choices,
            None if output.logits is None else output.logits[index],
            output.candidates,
            is_drawn,
        )
        for index, choices in enumerate(output.choice_ids.tolist())
    ]


def needed_scores(limits: ExecutorLimits, request: Request) -> Scores:
    """How much of a row choosing needs: nothing, its candidates (a small top-k), or all of it."""
    sampling = request.sampling
    if request.reads_rows if limits.draws else request.needs_logits:
        return Scores.LOGITS
    if limits.draws or sampling.greedy:
        return Scores.NONE
    is_small = sampling.top_k is not None and sampling.top_k <= MAX_CANDIDATE_TOP_K
    return Scores.CANDIDATES if is_small else Scores.LOGITS


def revises_rows(limits: ExecutorLimits, request: Request) -> bool:
    """Whether its tokens are chosen from rows of logits that only the host makes."""
    is_hosts = request.changes_logits or request.reads_processed
    return is_hosts or (limits.draws and request.is_hosts)


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
    if not state.revises_rows:
        if (known.is_drawn or sampling.greedy) and min(known.choice_ids) >= 0:
            return known.choice_ids.__getitem__
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


def _no_logits(wanted: str) -> DflashError:
    what = f"this back end hands out no logits, which {wanted} need"
    return DflashError(what, where="request", fix="leave them out", usage=True)

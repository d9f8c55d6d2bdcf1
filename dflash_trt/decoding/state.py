"""A request inside the generator."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from dflash_trt.backends.base import FloatArray, Scores
from dflash_trt.core.masks import TokenMask
from dflash_trt.decoding.logprobs import TokenLogprob, score_token
from dflash_trt.decoding.request import (
    FinishReason,
    Origin,
    Request,
    RequestResult,
    TokenEvent,
    TokenOrigin,
)
from dflash_trt.decoding.statistics import StatisticsRecorder
from dflash_trt.sampling.penalties import PenaltyState
from dflash_trt.text.detokenise import TextStream
from dflash_trt.text.grammar import Follower


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class RequestState:
    """A request inside the generator, from its submission to its result.

    `rows` is the size of its verify blocks (1: no drafts), `scores` and `takes_choices` say what
    choosing its tokens needs (scores.py), `max_tokens` is clipped to the
    context, `prefilled` counts the prompt tokens in the cache, `token_ids` are the output's.
    After a preemption the first `recomputed` of those are prefilled too, behind the prompt.
    `penalties` know its output so far, `mask` what its rules allow anywhere, `processed` are
    log-probabilities of tokens that a step has chosen and the output does not have yet.
    `logprobs` are wanted ones, the first `told` of which events had; the text of their tokens
    begins at `starts`, and `shown` characters of it are visible. `forced` are places of the newest
    block whose drafts a grammar put in, `origins` those of tokens, the first `traced` of which
    events had. Requests of one `flow` take turns with others as one.
    """

    request_id: int
    request: Request
    max_tokens: int
    rows: int
    scores: Scores = Scores.NONE
    takes_choices: bool = False
    stop_ids: frozenset[int]
    stream: TextStream | None
    recorder: StatisticsRecorder
    flow: Hashable
    prefilled: int = 0
    recomputed: int = 0
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logits: list[FloatArray] = field(default_factory=list)
    follower: Follower | None = None
    penalties: PenaltyState | None = None
    mask: TokenMask | None = None
    processed: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    told: int = 0
    shown: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    forced: frozenset[int] = frozenset()
    origins: list[TokenOrigin] = field(default_factory=list)
    traced: int = 0

    @property
    def cached_length(self) -> int:
        """Cache positions that hold accepted tokens: all but the newest token, the anchor."""
        return self.prefilled + max(len(self.token_ids) - 1, 0) - self.recomputed

    @property
    def prefill_length(self) -> int:
        """Tokens that its prefill has to cache: the prompt, and output that was preempted."""
        return len(self.request.prompt_ids) + self.recomputed

    @property
    def next_position(self) -> int:
        """Absolute position of the next output token."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def ends_next(self) -> bool:
        """Whether its output reaches its limit with the next token, whatever that is."""
        return len(self.token_ids) + 1 >= self.max_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are wanted and not all there."""
        wanted = self.request.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.request.prompt_ids) - 1

    def score_prompt(self, logits: FloatArray) -> None:
        """Takes the rows [S,V] of the prompt's next tokens, of which each scores the one behind.

        Computed again after a preemption, they are passed over.
        """
        known, top = len(self.prompt_logprobs), self.request.prompt_logprobs or 0
        behind = self.request.prompt_ids[known + 1 : self.prefilled + len(logits) + 1]
        rows = logits[known - self.prefilled :]
        self.prompt_logprobs += [
            score_token(row, token_id, top) for row, token_id in zip(rows, behind, strict=False)
        ]

    def ids(self, start: int, end: int) -> list[int]:
        """Token ids at the positions start … end - 1 of prompt and output."""
        prompt, known = self.request.prompt_ids, len(self.request.prompt_ids)
        output = self.token_ids[max(start - known, 0) : max(end - known, 0)]
        return [*prompt[start:end], *output]

    def begin_prefill(self, shared: int) -> None:
        """Starts with the first `shared` tokens in the cache, which other requests computed."""
        self.prefilled = shared
        self.recorder.record_shared(shared)

    def advance_prefill(self, length: int) -> None:
        """The next `length` tokens are in the cache."""
        self.prefilled += length
        self.recorder.record_prompt(min(self.prefilled, len(self.request.prompt_ids)))

    def preempt(self, *, yields: bool) -> None:
        """Forgets what is cached; the output stays, and is computed again without a choice.

        It `yields` to another's turn, or has lost its pages.
        """
        self.prefilled = 0
        self.recomputed = max(len(self.token_ids) - 1, 0)
        if yields:
            self.recorder.totals.yields += 1
            return
        for counts in (self.recorder, self.recorder.totals):
            counts.preemptions += 1

    def append_tokens(self, token_ids: list[int]) -> int:
        """Takes tokens up to the one that ends the output; returns how many it took."""
        before, ends = len(self.token_ids), not self.stop_ids.isdisjoint(token_ids)
        taken = token_ids[: self.max_tokens - before]
        if self.stream is None and not ends:
            self.token_ids += taken
        else:
            for token_id in taken:
                self._append_token(token_id)
                if self.finish_reason is not None:
                    break
        count = len(self.token_ids) - before
        if self.finish_reason is None and len(self.token_ids) == self.max_tokens:
            self.finish_reason = "length"
        self.recorder.totals.output_tokens += count
        return count

    def to_event(self, taken: int, accepted_tokens: int, now: float) -> TokenEvent:
        """The event for the newest `taken` tokens; the last one, at `now`, if it has finished."""
        if self.follower is not None:
            self.recorder.record_grammar(self.follower.seconds)
        newest = slice(len(self.token_ids) - taken, None)
        is_first = 0 < taken == len(self.token_ids)
        pieces = self.pieces[newest] if self.stream is not None else []
        text = "".join(pieces)
        result = None
        if self.finish_reason is not None:
            tail = self._flush_text()
            text += tail
            if pieces:
                pieces[-1] += tail
            self.recorder.finished_at = now
        self.shown += len(text)
        logprobs = self._tell_logprobs() if self.logprobs else ()
        origins = self._tell_origins(taken, accepted_tokens) if self.request.origins else ()
        if self.finish_reason is not None:
            result = self._to_result()
        return TokenEvent(
            request_id=self.request_id,
            token_ids=tuple(self.token_ids[newest]),
            accepted_tokens=accepted_tokens,
            text=text,
            pieces=tuple(pieces),
            finish_reason=self.finish_reason,
            result=result,
            logprobs=logprobs,
            prompt_logprobs=self._find_prompt_logprobs() if is_first else None,
            origins=origins,
        )

    def _tell_origins(self, taken: int, accepted: int) -> tuple[TokenOrigin, ...]:
        """Takes the newest tokens', and tells those whose text begins in what is visible."""
        newest = self.token_ids[len(self.token_ids) - taken :]
        for place, token_id in enumerate(newest):
            drafted: Origin = "grammar" if place in self.forced else "draft"
            self.origins.append(TokenOrigin(token_id, drafted if place < accepted else "target"))
        begin, self.traced = self.traced, len(self.origins)
        if self.stream is not None and not self.finish_reason:
            self.traced = begin + sum(start < self.shown for start in self.starts[begin:])
        return tuple(self.origins[begin : self.traced])

    def _tell_logprobs(self) -> tuple[TokenLogprob, ...]:
        begin, end = self.told, len(self.logprobs)
        if (stream := self.stream) is not None and (stream.stop_string or not self.finish_reason):
            end = begin + sum(start < self.shown for start in self.starts[begin:end])
        self.told = end
        return tuple(self.logprobs[begin:end])

    def _flush_text(self) -> str:
        """Releases held-back text; a stop string that it completes is why the output ended."""
        if self.stream is None:
            return ""
        before = self.stream.stop_string
        piece = self.stream.flush()
        if self.stream.stop_string != before and self.finish_reason == "length":
            self.finish_reason = "stop"
        self.pieces.append(piece)
        return piece

    def _to_result(self) -> RequestResult:
        assert self.finish_reason is not None
        return RequestResult(
            request_id=self.request_id,
            token_ids=tuple(self.token_ids),
            text=None if self.stream is None else "".join(self.pieces),
            finish_reason=self.finish_reason,
            statistics=self.recorder.freeze(len(self.request.prompt_ids), len(self.token_ids)),
            stop_reason=self._stop_reason(),
            logits=np.stack(self.logits) if self.logits else None,
            logprobs=None if self.request.logprobs is None else tuple(self.logprobs[: self.told]),
            prompt_logprobs=self._find_prompt_logprobs(),
        )

    def _find_prompt_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return None if self.request.prompt_logprobs is None else tuple(self.prompt_logprobs)

    def _stop_reason(self) -> str | int | None:
        if self.finish_reason != "stop":
            return None
        if self.stream is not None and self.stream.stop_string is not None:
            return self.stream.stop_string
        last = self.token_ids[-1]
        return last if last in self.request.stop_token_ids else None

    def _append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        wants_starts = self.request.origins or self.request.logprobs is not None
        if wants_starts and self.stream is not None:
            self.starts.append(self.stream.decoded)
        if token_id in self.stop_ids:
            shows = self.stream is not None and self.request.include_stop_str_in_output
            self.pieces.append(self.stream.push(token_id) if self.stream and shows else "")
            self.finish_reason = "stop"
            return
        if self.stream is not None:
            self.pieces.append(self.stream.push(token_id))
            if self.stream.stop_string is not None:
                self.finish_reason = "stop"

"""A request, its state inside the generator, its events and its result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dflash_trt.backends.base import FloatArray
from dflash_trt.core.masks import TokenMask
from dflash_trt.errors import DflashError
from dflash_trt.runtime.logprobs import (
    LOGPROBS_MODES,
    MAX_TOP_LOGPROBS,
    LogprobsMode,
    TokenLogprob,
    score_token,
)
from dflash_trt.runtime.statistics import RequestStatistics, StatisticsRecorder
from dflash_trt.runtime.values import as_ids, as_texts
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.sampling.penalties import Penalties, PenaltyState
from dflash_trt.sampling.rules import TokenRules
from dflash_trt.text.detokenise import TextStream
from dflash_trt.text.grammar import Follower
from dflash_trt.text.stops import check_stop_ids, check_stop_strings

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it.

    Args:
        prompt_ids: token ids, at least one; any sequence of integers, kept as a tuple.
        max_tokens: most output tokens (>= 1); None, or more than fit, is up to the end of the
            context (prompt + output <= max_seq_len).
        sampling: greedy by default.
        stop_token_ids: tokens that end the output, besides the model's end-of-sequence ids. The
            token itself is in the output's ids but not in its text.
        stop_strings: texts that end the output; the text is cut before the first of them, the
            token that completed it is the last of the output's ids.
        ignore_eos: do not end at the model's end-of-sequence ids.
        speculate: False decodes this request one token a step.
        block_size: rows of its verify steps, 2 … the trained block; None takes the generator's.
        logprobs: log-probabilities of the output's tokens are wanted, and of so many of the
            likeliest tokens at the place of each (0 … 20); None: no log-probabilities.
        logprobs_mode: "raw_logprobs", of the target's own rows, or "processed_logprobs", of those
            that tokens are chosen from: where they cannot come, minus infinity.
        prompt_logprobs: the same of the prompt's tokens but the first; all of it is computed then.
        penalties: change the logits that tokens are chosen from, not log-probabilities.
        rules: tokens that may not come.
        grammar: what the output must follow, compiled; it ends with the model's end of sequence.

    Raises:
        DflashError: a value that no generator could accept, or more to stop at than
            `text.stops` allows (usage).
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    speculate: bool = True
    block_size: int | None = None
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    prompt_logprobs: int | None = None
    penalties: Penalties = field(default_factory=Penalties)
    rules: TokenRules = field(default_factory=TokenRules)
    grammar: Follower | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", as_ids("prompt", self.prompt_ids))
        object.__setattr__(self, "stop_token_ids", as_ids("stop_token_ids", self.stop_token_ids))
        if not self.prompt_ids:
            raise DflashError("it holds no token", where="prompt", usage=True)
        if not isinstance(self.sampling, SamplingParams):  # a step would fail, and end all in it
            raise DflashError("it must be SamplingParams", where="sampling", usage=True)
        for name, value, least in (
            ("max_tokens", self.max_tokens, 1),
            ("block_size", self.block_size, 2),
        ):
            if value is not None and (type(value) is not int or value < least):
                raise DflashError(
                    f"{value!r} is not an integer of at least {least}", where=name, usage=True
                )
        for name in ("logprobs", "prompt_logprobs"):
            top = getattr(self, name)
            if top is not None and (type(top) is not int or not 0 <= top <= MAX_TOP_LOGPROBS):
                what = f"{top!r} is not an integer from 0 to {MAX_TOP_LOGPROBS}"
                raise DflashError(what, where=name, usage=True)
        if self.logprobs_mode not in LOGPROBS_MODES:
            what = f"{self.logprobs_mode!r} is none of {', '.join(LOGPROBS_MODES)}"
            raise DflashError(what, where="logprobs_mode", usage=True)
        object.__setattr__(self, "stop_strings", as_texts("stop_strings", self.stop_strings))
        if not isinstance(self.penalties, Penalties):
            raise DflashError("it must be Penalties", where="penalties", usage=True)
        if not isinstance(self.rules, TokenRules):
            raise DflashError("it must be TokenRules", where="rules", usage=True)
        if self.grammar is not None and self.ignore_eos:
            what = "does not go with a grammar, which the end of sequence ends"
            raise DflashError(what, where="ignore_eos", usage=True)
        check_stop_strings(self.stop_strings)
        check_stop_ids(self.stop_token_ids)

    @property
    def needs_logits(self) -> bool:
        """Whether whole rows of logits are needed, whoever chooses."""
        return self.logprobs is not None or self.changes_logits

    @property
    def reads_rows(self) -> bool:
        """Whether the host reads its rows, even where a graph draws its tokens."""
        return self.needs_logits or self.is_hosts

    @property
    def reads_processed(self) -> bool:
        """Whether log-probabilities are wanted of the rows that tokens are chosen from."""
        return self.logprobs is not None and self.logprobs_mode == "processed_logprobs"

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are chosen from other rows than the target's own."""
        return self.is_bound or not self.penalties.is_neutral

    @property
    def is_bound(self) -> bool:
        """Whether some tokens may not come."""
        return self.grammar is not None or not self.rules.is_neutral

    @property
    def is_hosts(self) -> bool:
        """Whether only the host can choose its tokens: graphs that draw know neither min_p nor
        other rows than the target's own."""
        if self.reads_processed:
            return True
        return self.changes_logits or (self.sampling.min_p > 0 and not self.sampling.greedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """A finished request.

    `token_ids` are the output's, `text` is None when the generator has no tokenizer. `stop_reason`
    is the stop string, or the one of the request's own stop tokens, that ended it. `logits`
    [len(token_ids), V] are the rows the tokens were chosen from, when the generator records them.
    `logprobs` are those of the tokens, in order, where the request wants them; tokens that a stop
    string cut off entirely have none. `prompt_logprobs` are those of the prompt's tokens from the
    second on.
    """

    request_id: int
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    statistics: RequestStatistics
    stop_reason: str | int | None = None
    logits: FloatArray | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """What a step did for one request: new tokens, new text, or its end.

    Of `token_ids` the first `accepted_tokens` were drafted; the other one is the prefill's first
    token or a step's bonus. `text` is what became visible and `pieces` the same per token; what
    was held back until the end belongs to the last. `result` comes with the finish reason.
    `logprobs`, where wanted, are of the next tokens whose text begins in what is visible by now:
    they may come later than the token's id.
    """

    request_id: int
    token_ids: tuple[int, ...]
    accepted_tokens: int
    text: str
    pieces: tuple[str, ...]
    finish_reason: FinishReason | None = None
    result: RequestResult | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True, kw_only=True)
class RequestState:
    """A request inside the generator, from its submission to its result.

    `rows` is the size of its verify blocks (1: no drafts), `max_tokens` is clipped to the
    context, `prefilled` counts the prompt tokens in the cache, `token_ids` are the output's.
    After a preemption the first `recomputed` of those are prefilled too, behind the prompt.
    From cache position `injected_until` on the drafter's context is missing; None: it is whole.
    `forgone_s` are the seconds that drafts would have saved since they would pay.
    `penalties` know its output so far, `mask` what its rules allow anywhere, `processed` are
    log-probabilities of tokens that a step has chosen and the output does not have yet.
    `logprobs` are wanted ones, the first `told` of which events had; the text of their tokens
    begins at `starts`, and `shown` characters of it are visible.
    """

    request_id: int
    request: Request
    max_tokens: int
    rows: int
    stop_ids: frozenset[int]
    stream: TextStream | None
    recorder: StatisticsRecorder
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
    injected_until: int | None = None
    forgone_s: float = 0.0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    told: int = 0
    shown: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def cached_length(self) -> int:
        """Cache positions that hold accepted tokens: all but the newest token, the anchor."""
        return self.prefilled + max(len(self.token_ids) - 1, 0) - self.recomputed

    @property
    def shareable_length(self) -> int:
        """Cache positions whose rows are final, the drafter's among them."""
        if self.injected_until is None:
            return self.cached_length
        return min(self.cached_length, self.injected_until)

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

    def skip_injection(self) -> None:
        """Remembers that what is cached from here on is not in the drafter's context."""
        if self.injected_until is None:
            self.injected_until, self.forgone_s = self.cached_length, 0.0

    def begin_prefill(self, shared: int) -> None:
        """Starts with the first `shared` tokens in the cache, which other requests computed."""
        self.prefilled = shared
        if self.recorder.cached_prompt_tokens is None:
            self.recorder.cached_prompt_tokens = shared

    def preempt(self) -> None:
        """Forgets what is cached; the output stays, and is computed again without a choice."""
        self.prefilled, self.injected_until = 0, None
        self.recomputed = max(len(self.token_ids) - 1, 0)
        self.recorder.preemptions += 1

    def append_tokens(self, token_ids: Iterable[int]) -> int:
        """Takes tokens up to the one that ends the output; returns how many it took."""
        taken = 0
        for token_id in token_ids:
            self._append_token(token_id)
            taken += 1
            if self.finish_reason is not None:
                break
        return taken

    def to_event(self, taken: int, accepted_tokens: int, now: float) -> TokenEvent:
        """The event for the newest `taken` tokens; the last one, at `now`, if it has finished."""
        newest = slice(len(self.token_ids) - taken, None)
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
        logprobs = self._tell_logprobs()
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
        )

    def _tell_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Those whose tokens no stop string can cut off any more."""
        begin, end = self.told, len(self.logprobs)
        stopped = self.stream is not None and self.stream.stopped
        if self.stream is not None and (stopped or self.finish_reason is None):
            end = begin + sum(start < self.shown for start in self.starts[begin:end])
        self.told = end
        return tuple(self.logprobs[begin:end])

    def _flush_text(self) -> str:
        """Releases held-back text; a stop string that it completes is why the output ended."""
        if self.stream is None:
            return ""
        stopped = self.stream.stopped
        piece = self.stream.flush()
        if self.stream.stopped and not stopped and self.finish_reason == "length":
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
            statistics=self.recorder.freeze(
                len(self.request.prompt_ids),
                len(self.token_ids),
                None if self.follower is None else self.follower.seconds,
            ),
            stop_reason=self._stop_reason(),
            logits=np.stack(self.logits) if self.logits else None,
            logprobs=None if self.request.logprobs is None else tuple(self.logprobs[: self.told]),
            prompt_logprobs=(
                None if self.request.prompt_logprobs is None else tuple(self.prompt_logprobs)
            ),
        )

    def _stop_reason(self) -> str | int | None:
        if self.finish_reason != "stop":
            return None
        if self.stream is not None and self.stream.stopped:
            return self.stream.stop_string
        last = self.token_ids[-1]
        return last if last in self.request.stop_token_ids else None

    def _append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.request.logprobs is not None and self.stream is not None:
            self.starts.append(self.stream.decoded)
        if token_id in self.stop_ids:
            self.pieces.append("")
            self.finish_reason = "stop"
            return
        if self.stream is not None:
            self.pieces.append(self.stream.push(token_id))
            if self.stream.stopped:
                self.finish_reason = "stop"
                return
        if len(self.token_ids) == self.max_tokens:
            self.finish_reason = "length"

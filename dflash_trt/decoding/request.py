"""A request, its events, its result and its errors."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypedDict, get_args

from dflash_trt.backends.base import ExecutorLimits, FloatArray
from dflash_trt.core.limits import TOO_LONG, advise_shorter
from dflash_trt.decoding.logprobs import (
    LOGPROBS_MODES,
    MAX_TOP_LOGPROBS,
    LogprobsMode,
    TokenLogprob,
)
from dflash_trt.decoding.statistics import RequestStatistics
from dflash_trt.errors import DflashError
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.sampling.penalties import Penalties
from dflash_trt.sampling.token_rules import TokenRules
from dflash_trt.text.detokenise import check_stop_ids, check_stop_strings
from dflash_trt.text.grammar import Follower

FinishReason = Literal["stop", "length", "cancelled"]
Origin = Literal["target", "draft", "grammar"]
"""Who proposed a token of the output: nobody, so that it is the target's own; the drafter; or a
grammar, which put it in the drafter's place. The target chose all of them."""
ORIGINS: tuple[Origin, ...] = get_args(Origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """How a prompt is continued, whether it is a text or tokens.

    Args:
        max_tokens: most output tokens (>= 1); None, or more than fit, is up to the end of the
            context (prompt + output <= max_seq_len).
        sampling: greedy by default.
        stop_strings: texts that end the output; the text is cut before the first of them, the
            token that completed it is the last of the output's ids.
        stop_token_ids: tokens that end the output, besides the model's end-of-sequence ids. The
            token itself is in the output's ids but not in its text.
        ignore_eos: do not end at the model's end-of-sequence ids.
        min_tokens: before so many output tokens none that would end the output may come.
        include_stop_str_in_output: the text has the stop string, or the stop token's text, too.
        skip_special_tokens: False shows special tokens in the text, but for one that ends it.
        logprobs: log-probabilities of the output's tokens are wanted, and of so many of the
            likeliest tokens at the place of each (0 … 20); None: no log-probabilities.
        logprobs_mode: "raw_logprobs", of the target's own rows, or "processed_logprobs", of those
            that tokens are chosen from: where they cannot come, minus infinity.
        prompt_logprobs: the same of the prompt's tokens but the first; all of it is computed then.
        penalties: change the logits that tokens are chosen from, not log-probabilities.
        origins: events tell of the output's tokens where they came from.

    Raises:
        DflashError: a value that no generator could accept, or more to stop at than
            `text.detokenise` allows (usage).
    """

    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    prompt_logprobs: int | None = None
    penalties: Penalties = field(default_factory=Penalties)
    origins: bool = False

    def __post_init__(self) -> None:
        # A step would fail of another type, and end all requests in it.
        _check_kind("sampling", self.sampling, SamplingParams)
        _check_kind("penalties", self.penalties, Penalties)
        _check_least("max_tokens", self.max_tokens, 1)
        _check_least("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            what = f"{self.min_tokens} is more than max_tokens, {self.max_tokens}"
            raise DflashError(what, where="min_tokens", usage=True)
        if self.min_tokens and self.stop_strings:
            what = "does not go with stop strings, which may come anywhere"
            raise DflashError(what, where="min_tokens", usage=True)
        for name in ("logprobs", "prompt_logprobs"):
            top = getattr(self, name)
            if top is not None and (type(top) is not int or not 0 <= top <= MAX_TOP_LOGPROBS):
                what = f"{top!r} is not an integer from 0 to {MAX_TOP_LOGPROBS}"
                raise DflashError(what, where=name, usage=True)
        if self.logprobs_mode not in LOGPROBS_MODES:
            what = f"{self.logprobs_mode!r} is none of {', '.join(LOGPROBS_MODES)}"
            raise DflashError(what, where="logprobs_mode", usage=True)
        object.__setattr__(self, "stop_strings", _as_texts("stop_strings", self.stop_strings))
        check_stop_strings(self.stop_strings)
        object.__setattr__(self, "stop_token_ids", _as_ids("stop_token_ids", self.stop_token_ids))
        check_stop_ids(self.stop_token_ids)


class ContinuationOptions(TypedDict, total=False):
    """Keywords of `Continuation` beside its sampling."""

    max_tokens: int | None
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    min_tokens: int
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    logprobs: int | None
    logprobs_mode: LogprobsMode
    prompt_logprobs: int | None
    penalties: Penalties
    origins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Continuation):
    """One prompt of tokens and how to continue it.

    Args:
        prompt_ids: token ids, at least one; any sequence of integers, kept as a tuple.
        speculate: False decodes this request one token a step.
        block_size: rows of its verify steps, 2 … the trained block; None takes the generator's.
        rules: tokens that may not come.
        grammar: what the output must follow, compiled; it ends with the model's end of sequence.
    """

    prompt_ids: tuple[int, ...]
    speculate: bool = True
    block_size: int | None = None
    rules: TokenRules = field(default_factory=TokenRules)
    grammar: Follower | None = None

    def __post_init__(self) -> None:
        Continuation.__post_init__(self)  # slots leave `super()` without its class
        object.__setattr__(self, "prompt_ids", _as_ids("prompt", self.prompt_ids))
        if not self.prompt_ids:
            raise DflashError("it holds no token", where="prompt", usage=True)
        _check_least("block_size", self.block_size, 2)
        _check_kind("rules", self.rules, TokenRules)
        if self.grammar is not None and self.ignore_eos:
            what = "does not go with a grammar, which the end of sequence ends"
            raise DflashError(what, where="ignore_eos", usage=True)
        if self.grammar is not None and self.min_tokens:
            what = "does not go with a grammar, which says when the output may end"
            raise DflashError(what, where="min_tokens", usage=True)

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
        return self.grammar is not None or not self.rules.is_neutral or self.holds_ends

    @property
    def holds_ends(self) -> bool:
        """Whether tokens that would end the output may not come at first."""
        return self.min_tokens > 0 and (not self.ignore_eos or bool(self.stop_token_ids))

    @property
    def is_hosts(self) -> bool:
        """Whether only the host can choose its tokens: graphs that draw know neither min_p nor
        other rows than the target's own."""
        if self.reads_processed:
            return True
        return self.changes_logits or (self.sampling.min_p > 0 and not self.sampling.greedy)


class TokenOrigin(NamedTuple):
    """Says of a token of the output who proposed it."""

    token_id: int
    origin: Origin


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
    they may come later than the token's id; so do `origins`, all of which have come with the last
    event. `prompt_logprobs`, where wanted, come with the first tokens.
    """

    request_id: int
    token_ids: tuple[int, ...]
    accepted_tokens: int
    text: str
    pieces: tuple[str, ...]
    finish_reason: FinishReason | None = None
    result: RequestResult | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    origins: tuple[TokenOrigin, ...] = ()


class RequestFailedError(DflashError):
    """Request `request_id` cannot continue. The others can, once it is cancelled.

    Of requests that a pair was given together `results` has theirs, None for each that failed.
    """

    def __init__(self, request_id: int, error: DflashError) -> None:
        super().__init__(error.what, where=error.where, fix=error.fix, usage=error.usage)
        self.request_id = request_id
        self.results: list[RequestResult | None] = []


def check_request(request: Request, limits: ExecutorLimits, has_tokenizer: bool) -> None:
    """Raises DflashError (usage) naming the first thing about `request` that cannot run."""
    length, longest = len(request.prompt_ids), limits.max_seq_len - 1
    if length > longest:
        held = f"a prompt of at most {longest} and one output token"
        what = f"{length} tokens do {TOO_LONG} of {limits.max_seq_len} holds {held}"
        fix = advise_shorter(limits.max_seq_len, limits.longest)
        raise DflashError(what, where="prompt", fix=fix, usage=True)
    ids = {"prompt": request.prompt_ids, "stop_token_ids": request.stop_token_ids}
    ids["logit_bias"] = tuple(token_id for token_id, _ in request.penalties.bias)
    for where, token_ids in (*ids.items(), *request.rules.named()):
        check_vocabulary(token_ids, limits.vocab_size, where)
    if request.prompt_logprobs is not None and not limits.takes_any_chunk:
        what = "engines hand out the logits of a prompt's last token alone"
        raise DflashError(what, where="prompt_logprobs", fix="leave it out", usage=True)
    if request.stop_strings and not has_tokenizer:
        what = "the generator has no tokenizer to find them with"
        raise DflashError(what, where="stop_strings", usage=True)
    check_block_size(request.block_size, limits)


def check_block_size(block_size: int | None, limits: ExecutorLimits) -> None:
    """Raises DflashError (usage) unless `block_size` is None or 2 … the trained block."""
    if block_size is not None and not 2 <= block_size <= limits.block_size:
        what = f"{block_size} is not between 2 and {limits.block_size}, the drafter's trained block"
        raise DflashError(what, where="block_size", usage=True)


def check_vocabulary(token_ids: Iterable[int], vocab_size: int, where: str) -> None:
    """Raises DflashError (usage) for the first id that the vocabulary has not."""
    outside = next((one for one in token_ids if not 0 <= one < vocab_size), None)
    if outside is not None:
        what = f"token id {outside} is outside the vocabulary of {vocab_size}"
        raise DflashError(what, where=where, usage=True)


def _as_ids(name: str, token_ids: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, token_ids))
    except TypeError as error:
        raise DflashError("it must be a list of token ids", where=name, usage=True) from error


def _as_texts(name: str, texts: object) -> tuple[str, ...]:
    if not isinstance(texts, list | tuple) or not all(
        isinstance(text, str) and text for text in texts
    ):
        raise DflashError("it must be a list of texts, none of them empty", where=name, usage=True)
    return tuple(texts)


def _check_least(name: str, value: int | None, least: int) -> None:
    if value is not None and (type(value) is not int or value < least):
        what = f"{value!r} is not an integer of at least {least}"
        raise DflashError(what, where=name, usage=True)


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise DflashError(f"it must be {kind.__name__}", where=name, usage=True)

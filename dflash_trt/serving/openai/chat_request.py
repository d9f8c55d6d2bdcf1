"""Bodies of OpenAI's completion requests, and what they ask of the served model."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from dflash_trt.bundle.sampling_defaults import ALL_TOKENS, MAX_NEW_TOKENS, SamplingDefaults
from dflash_trt.decoding import SamplingParams
from dflash_trt.decoding.logprobs import MAX_TOP_LOGPROBS, LogprobsMode
from dflash_trt.errors import DflashError
from dflash_trt.sampling.penalties import MOST_BIASED, Penalties, TokenName
from dflash_trt.sampling.token_rules import MOST_BAD
from dflash_trt.serving.client.client import GenerationRequest, Prompt
from dflash_trt.serving.openai.access import GOOD_ID
from dflash_trt.serving.openai.body import Body, Count, Text, TokenId, read_body
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.messages import (
    Conversation,
    Messages,
    TemplateBody,
    read_conversation,
)
from dflash_trt.serving.openai.structured import StructuredBody, find_warnings, read_structure

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat's default is the end of the context
_SAMPLING = [one.name for one in fields(SamplingParams)]
_AS_GIVEN = (
    *("ignore_eos", "min_tokens", "include_stop_str_in_output", "skip_special_tokens"),
    *("add_special_tokens", "logprobs_mode", "prompt_logprobs", "speculate"),
)
MOST_CHOICES = 64
"""Outputs of one request; each takes a place of the served model."""


def _find_form(given: Any) -> str:
    """A text, token ids, or (as pydantic is told) several of them."""
    if not isinstance(given, list):
        return "text"
    return "ids" if given and type(given[0]) is int else "several"


def _find_inner_form(given: Any) -> str:
    return "ids" if isinstance(given, list) else "text"


def _as_list(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
OnePrompt = Annotated[
    Annotated[Text, Tag("text")] | Annotated[Ids, Tag("ids")], Discriminator(_find_inner_form)
]
Prompts = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[OnePrompt], Field(min_length=1, max_length=MOST_CHOICES), Tag("several")],
    Discriminator(_find_form),
]
TopK = Annotated[int | None, AfterValidator(lambda given: None if given in ALL_TOKENS else given)]
Stops = Annotated[list[Text], BeforeValidator(_as_list)]


def _read_seed(given: int) -> int:
    """A seed of int64 as one of uint64; -1 is none, as in vLLM."""
    if given == -1:
        return _draw_seed()
    return given + 2**64 if -(2**63) <= given < 0 else given


def _draw_seed() -> int:
    return secrets.randbits(63)


def _check_cut(given: int) -> int:
    if given == 0 or given < -1:
        raise ValueError("must be at least 1, or -1 for what fits")
    return given


class _StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_tokens: bool = False
    # It hides lengths from who listens on the wire, and adds nothing that is shown.
    include_obfuscation: Any = None


class _CommonBody(StructuredBody):
    """Fields of both kinds of request; ranges are checked by what they become."""

    model: str
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    n: Count = 1
    best_of: int | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: Annotated[int, AfterValidator(_read_seed)] = Field(default_factory=_draw_seed)
    stop: Stops = Field([])
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[TokenName, float] = Field({}, max_length=MOST_BIASED)
    # vLLM's additions that benchmarks and users send.
    stop_token_ids: list[int] = Field([], fail_fast=True)
    top_k: TopK = None
    min_p: float = 0.0
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    repetition_penalty: float = 1.0
    bad_words: list[Text] = Field([], max_length=MOST_BAD)
    allowed_token_ids: list[int] | None = Field(None, fail_fast=True)
    logprobs_mode: LogprobsMode = "raw_logprobs"
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: Annotated[int, AfterValidator(_check_cut)] | None = None
    return_token_ids: bool = False
    request_id: Annotated[str, Field(pattern=GOOD_ID)] | None = None
    speculate: bool = True
    # They change nothing about an answer.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    # Without an implementation, with the values that ask for nothing.
    service_tier: Literal["auto", "default"] = "auto"
    priority: Literal[0] = 0
    length_penalty: Literal[1] = 1
    spaces_between_special_tokens: Literal[True] = True
    detokenize: Literal[True] = True


class _CompletionBody(_CommonBody):
    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    add_special_tokens: bool = True
    suffix: Literal[""] = ""
    separate_reasoning: ClassVar[bool] = False


class _ChatBody(_CommonBody, TemplateBody):
    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True  # SGLang's name and default
    functions: list[Any] = Field([], max_length=0)
    function_call: Literal["none", "auto"] = "auto"
    add_special_tokens: bool = False  # a chat's template writes them itself
    include_reasoning: Literal[True] = True
    stream_reasoning: Literal[True] = True
    verbosity: Literal["medium"] = "medium"
    modalities: list[Literal["text"]] = Field(["text"])
    store: Literal[False] = False
    echo: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What both kinds of request ask for: `prompts` of a completion, one or more, or a `chat`.

    A chat's prompt is empty in `generation`, until its template has run.
    """

    body: _CompletionBody | _ChatBody
    generation: GenerationRequest
    prompts: tuple[Prompt, ...] = ()
    chat: Conversation | None = None
    warnings: tuple[str, ...] = ()  # of schemas: what is not enforced

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.body.stream_options.include_usage

    @property
    def counts_always(self) -> bool:
        """Whether each chunk of a stream has the token counts so far."""
        options = self.body.stream_options
        return options.include_usage and options.continuous_usage_stats

    @property
    def needs_ids(self) -> bool:
        """Whether its prompts have to be token ids before they are sent."""
        cuts = self.body.truncate_prompt_tokens is not None
        return cuts or self.body.return_token_ids or self.counts_always

    def with_ids(self, prompts: Sequence[tuple[int, ...]], max_seq_len: int) -> CompletionRequest:
        """The request of token ids, of which the last are kept that it asks for."""
        most = self.body.truncate_prompt_tokens
        if most == -1:
            most = max(max_seq_len - (self.generation.max_tokens or 1), 1)
        kept = tuple(one if most is None else one[-most:] for one in prompts)
        return replace(self, prompts=kept, generation=replace(self.generation, prompt=kept[0]))

    @property
    def echoes_only(self) -> bool:
        """Whether the answer is the prompt alone, and the token that has to come is not told."""
        return self.body.echo and self.body.max_tokens == 0

    def outputs(self) -> list[GenerationRequest]:
        """What is asked of the model: of one prompt after the other its samples.

        A sample's seed is one more than that of the sample before it, so that each can be had
        again alone. The prompt of a chat is looked at once. Together they are one flow.
        """
        generation = replace(self.generation, flow=secrets.token_hex(8))
        seed = generation.sampling.seed
        asked = [
            replace(generation, prompt=prompt, sampling=replace(generation.sampling, seed=one))
            for prompt in self.prompts or (generation.prompt,)
            for one in ((seed + sample) % 2**64 for sample in range(self.body.n))
        ]
        if self.chat is None:
            return asked
        return [asked[0], *(replace(one, prompt_logprobs=None) for one in asked[1:])]


def read_completion(raw: Any, defaults: SamplingDefaults | None = None) -> CompletionRequest:
    """Reads the body of POST /v1/completions, whose length has OpenAI's default."""
    body = read_body(_CompletionBody, raw, defaults)
    given: Any = [body.prompt] if _find_form(body.prompt) != "several" else body.prompt
    prompts = tuple(tuple(one) if isinstance(one, list) else one for one in given)
    most = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    most = most or int(body.echo)
    generation = _read_generation(body, prompts, most, body.logprobs)
    if body.echo and body.logprobs is not None:
        of_prompt = max(body.logprobs, body.prompt_logprobs or 0)
        generation = replace(generation, prompt_logprobs=of_prompt)
    told = find_warnings(body, None)
    return CompletionRequest(body=body, generation=generation, prompts=prompts, warnings=told)


def read_chat(raw: Any, defaults: SamplingDefaults | None = None) -> CompletionRequest:
    """Reads the body of POST /v1/chat/completions."""
    body = read_body(_ChatBody, raw, defaults)
    most = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if body.max_completion_tokens not in (None, most):
        raise ApiError("differs from max_completion_tokens", param="max_tokens")
    most = (defaults or {}).get(MAX_NEW_TOKENS) if most is None else most
    if body.top_logprobs and not body.logprobs:
        raise ApiError("goes with logprobs: true only", param="top_logprobs")
    generation = _read_generation(body, (), most, body.top_logprobs if body.logprobs else None)
    parallel = body.parallel_tool_calls
    chat = read_conversation(body.messages, body, body.tool_choice, parallel=parallel)
    told = find_warnings(body, chat.tools)
    return CompletionRequest(body=body, generation=generation, chat=chat, warnings=told)


def _read_generation(
    body: _CompletionBody | _ChatBody,
    prompts: tuple[Prompt, ...],
    max_tokens: int | None,
    logprobs: int | None,
) -> GenerationRequest:
    """What is asked of the served model; a chat has no prompt yet."""
    count = len(prompts) or 1
    if count * body.n > MOST_CHOICES:
        of = f"{body.n:,}" if count == 1 else f"{count:,} prompts of {body.n:,}"
        what = f"{of} outputs are more than {MOST_CHOICES} in one request"
        raise ApiError(what, param="n" if body.n > 1 else "prompt")
    if body.best_of not in (None, body.n):
        raise ApiError(f"must be n, {body.n}, not {body.best_of}", param="best_of")
    if body.stream_options != _StreamOptions() and not body.stream:
        raise ApiError("goes with stream: true only", param="stream_options")
    grammar, allowed = read_structure(body), body.allowed_token_ids
    try:
        return GenerationRequest(
            prompt=prompts[0] if prompts else "",
            max_tokens=max_tokens,
            sampling=SamplingParams(**{name: getattr(body, name) for name in _SAMPLING}),
            stop_strings=tuple(body.stop),
            stop_token_ids=tuple(body.stop_token_ids),
            streaming=body.stream,
            logprobs=logprobs,
            origins=body.stream_options.include_tokens,
            penalties=Penalties(
                frequency=body.frequency_penalty,
                presence=body.presence_penalty,
                repetition=body.repetition_penalty,
                bias=tuple((int(name), one) for name, one in body.logit_bias.items()),
            ),
            allowed_token_ids=allowed if allowed is None else tuple(allowed),
            bad_words=tuple(body.bad_words),
            grammar=grammar,
            **{name: getattr(body, name) for name in _AS_GIVEN},
        )
    except DflashError as error:
        param = "stop" if error.where == "stop_strings" else error.where
        raise ApiError(error.what, param=param) from error

"""Bodies of OpenAI's completion requests, and what they ask of the served model."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from dflash_trt.decoding import SamplingParams
from dflash_trt.decoding.logprobs import LogprobsMode
from dflash_trt.errors import DflashError
from dflash_trt.sampling.penalties import MOST_BIASED, Penalties, TokenName
from dflash_trt.sampling.token_rules import MOST_BAD
from dflash_trt.serving.client.client import GenerationRequest, Prompt
from dflash_trt.serving.openai.body import Body, Count, Text, TokenId, as_refusal, read_body
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.messages import (
    Conversation,
    Messages,
    TemplateBody,
    read_conversation,
)
from dflash_trt.serving.openai.structured import StructuredBody, read_structure

MAX_STOPS = 4
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat's default is the end of the context
_SAMPLING = [one.name for one in fields(SamplingParams)]
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
Stops = Annotated[list[Text], Field(max_length=MAX_STOPS), BeforeValidator(_as_list)]


class _StreamOptions(Body):
    include_usage: bool = False
    # It hides lengths from who listens on the wire, and adds nothing that is shown.
    include_obfuscation: Any = None


class _CommonBody(StructuredBody):
    """Fields of both kinds of request; ranges are checked by what they become."""

    model: str
    stream: bool = False
    stream_options: _StreamOptions | None = None
    n: Count = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = Field(default_factory=lambda: secrets.randbits(63))
    stop: Stops = Field([])
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[TokenName, float] = Field({}, max_length=MOST_BIASED)
    # vLLM's additions that benchmarks and users send.
    top_k: int | None = None
    min_p: float = 0.0
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    bad_words: list[Text] = Field([], max_length=MOST_BAD)
    allowed_token_ids: list[int] | None = Field(None, fail_fast=True)
    logprobs_mode: LogprobsMode = "raw_logprobs"
    prompt_logprobs: int | None = None
    # They change nothing about an answer.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    # Without an implementation, with the values that ask for nothing.
    service_tier: Literal["auto", "default"] = "auto"


class _CompletionBody(_CommonBody):
    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool = False
    best_of: Literal[1] = 1
    suffix: Literal[""] = ""


class _ChatBody(_CommonBody, TemplateBody):
    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True  # SGLang's name and default
    functions: list[Any] = Field([], max_length=0)
    function_call: Literal["none", "auto"] = "auto"
    modalities: list[Literal["text"]] = Field(["text"])
    store: Literal[False] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What both kinds of request ask for.

    Args:
        generation: for the served model; a chat's prompt is empty until its template has run.
        samples: outputs of each prompt.
        prompts: of a completion, at least one; none of a chat.
        echo: a completion's texts begin with their prompts.
        prompt_logprobs: so many alternatives of each token of a prompt are shown; None: nothing is.
        chat: what the prompt of a chat is made of; None of a completion.
        separates_reasoning: a chat's reply tells it from the content, where the model marks it.
        include_usage: a stream ends with the token counts.
    """

    model: str
    generation: GenerationRequest
    include_usage: bool
    samples: int = 1
    prompts: tuple[Prompt, ...] = ()
    echo: bool = False
    prompt_logprobs: int | None = None
    chat: Conversation | None = None
    separates_reasoning: bool = False

    @property
    def is_chat(self) -> bool:
        return self.chat is not None

    def outputs(self) -> list[GenerationRequest]:
        """What is asked of the model: of one prompt after the other its samples.

        A sample's seed is one more than that of the sample before it, so that each can be had
        again alone. The prompt of a chat is looked at once.
        """
        sampling = self.generation.sampling
        samplings = [
            replace(sampling, seed=(sampling.seed + sample) % 2**64)
            for sample in range(self.samples)
        ]
        if self.is_chat:
            first, *others = (replace(self.generation, sampling=one) for one in samplings)
            return [first, *(replace(one, prompt_logprobs=None) for one in others)]
        return [
            replace(self.generation, prompt=prompt, sampling=one)
            for prompt in self.prompts
            for one in samplings
        ]


def read_completion(raw: Any) -> CompletionRequest:
    """Reads the body of POST /v1/completions."""
    body = read_body(_CompletionBody, raw)
    given: Any = [body.prompt] if _find_form(body.prompt) != "several" else body.prompt
    prompts = tuple(tuple(one) if isinstance(one, list) else one for one in given)
    _check_choices(len(prompts), body.n)
    most = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    generation = _read_generation(body, prompts[0], most, body.logprobs)
    if body.echo and body.logprobs is not None:
        of_prompt = max(body.logprobs, body.prompt_logprobs or 0)
        generation = replace(generation, prompt_logprobs=of_prompt)
    return CompletionRequest(
        model=body.model,
        generation=generation,
        include_usage=_read_usage(body),
        samples=body.n,
        prompts=prompts,
        echo=body.echo,
        prompt_logprobs=body.prompt_logprobs,
    )


def read_chat(raw: Any) -> CompletionRequest:
    """Reads the body of POST /v1/chat/completions."""
    body = read_body(_ChatBody, raw)
    _check_choices(1, body.n)
    most = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if body.max_completion_tokens not in (None, most):
        raise ApiError("differs from max_completion_tokens", param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise ApiError("goes with logprobs: true only", param="top_logprobs")
    top = body.top_logprobs if body.logprobs else None
    return CompletionRequest(
        model=body.model,
        generation=_read_generation(body, None, most, top),
        include_usage=_read_usage(body),
        samples=body.n,
        prompt_logprobs=body.prompt_logprobs,
        chat=read_conversation(
            body.messages, body, body.tool_choice, parallel=body.parallel_tool_calls
        ),
        separates_reasoning=body.separate_reasoning,
    )


def _read_generation(
    body: _CommonBody, prompt: Prompt | None, max_tokens: int | None, logprobs: int | None
) -> GenerationRequest:
    """What is asked of the served model; a chat has no prompt yet."""
    grammar, allowed = read_structure(body), body.allowed_token_ids
    try:
        return GenerationRequest(
            prompt=prompt or "",
            max_tokens=max_tokens,
            sampling=SamplingParams(**{name: getattr(body, name) for name in _SAMPLING}),
            stop_strings=tuple(body.stop),
            ignore_eos=body.ignore_eos,
            add_special_tokens=prompt is not None,  # a chat's template writes them itself
            streaming=body.stream,
            logprobs=logprobs,
            logprobs_mode=body.logprobs_mode,
            prompt_logprobs=body.prompt_logprobs,
            penalties=Penalties(
                frequency=body.frequency_penalty,
                presence=body.presence_penalty,
                repetition=body.repetition_penalty,
                bias=tuple((int(name), one) for name, one in body.logit_bias.items()),
            ),
            allowed_token_ids=allowed if allowed is None else tuple(allowed),
            bad_words=tuple(body.bad_words),
            grammar=grammar,
        )
    except DflashError as error:
        raise as_refusal(error, stop_strings="stop") from error


def _read_usage(body: _CommonBody) -> bool:
    """Whether the stream's end has the usage."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise ApiError("goes with stream: true only", param="stream_options")
    return body.stream_options.include_usage


def _check_choices(prompts: int, samples: int) -> None:
    """Raises ApiError for more outputs than a request may have."""
    if prompts * samples > MOST_CHOICES:
        of = f"{samples:,}" if prompts == 1 else f"{prompts:,} prompts of {samples:,}"
        what = f"{of} outputs are more than {MOST_CHOICES} in one request"
        raise ApiError(what, param="n" if samples > 1 else "prompt")

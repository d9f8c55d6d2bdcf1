"""Bodies of OpenAI's completion requests: read strictly, refused by name where not supported."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError
from dflash_trt.runtime import SamplingParams
from dflash_trt.sampling.penalties import MOST_BIASED, Penalties
from dflash_trt.sampling.rules import MOST_BAD, TokenRules
from dflash_trt.serving.client.client import GenerationRequest, Prompt
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.logprobs import (
    read_chat_logprobs,
    read_completion_logprobs,
    read_logprobs_mode,
    read_prompt_logprobs,
)
from dflash_trt.serving.openai.messages import read_messages
from dflash_trt.serving.openai.prompts import check_choices, check_text, read_prompts
from dflash_trt.serving.openai.structured import FIELDS as STRUCTURED
from dflash_trt.serving.openai.structured import read_structure
from dflash_trt.serving.openai.templates import EFFORT, VARIABLES, read_variables
from dflash_trt.serving.openai.tools import FIELDS as TOOLS
from dflash_trt.serving.openai.tools import read_tools
from dflash_trt.text.chat import Message
from dflash_trt.text.stops import check_stop_strings
from dflash_trt.text.tools import ToolUse

MAX_STOPS = 4
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat's default is the end of the context

_UNDERSTOOD = (
    "model stream stream_options max_tokens temperature top_p seed stop n "
    # vLLM's additions that benchmarks and users send.
    "top_k ignore_eos "
    "frequency_penalty presence_penalty logit_bias repetition_penalty "
    "min_p bad_words allowed_token_ids logprobs_mode prompt_logprobs "
    # They change nothing about an answer.
    "user metadata safety_identifier prompt_cache_key"
).split()
_CHAT = {*_UNDERSTOOD, "messages", "max_completion_tokens", EFFORT, VARIABLES} | {
    "separate_reasoning",
    "logprobs",
    "top_logprobs",
    *STRUCTURED,
    *TOOLS,
}
_COMPLETION = {*_UNDERSTOOD, *STRUCTURED, "prompt", "logprobs", "echo"}
# Parameters without an implementation, and the values that ask for nothing (null always does).
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default"),
}
_NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "best_of": (1,),
    "suffix": ("",),
}
_NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What both kinds of request ask for.

    Args:
        generation: for the served model; a chat's prompt is empty until its template has run.
        samples: outputs of each prompt.
        prompts: of a completion, at least one; none of a chat.
        echo: a completion's texts begin with their prompts.
        prompt_logprobs: so many alternatives of each token of a prompt are shown; None: nothing is.
        messages: of a chat, at least one; none of a completion.
        variables: of a chat's template.
        separates_reasoning: a chat's reply tells it from the content, where the model marks it.
        tools: that a chat's answer may call; None where there are none.
        include_usage: a stream ends with the token counts.
    """

    model: str
    generation: GenerationRequest
    include_usage: bool
    samples: int = 1
    prompts: tuple[Prompt, ...] = ()
    echo: bool = False
    prompt_logprobs: int | None = None
    messages: tuple[Message, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    separates_reasoning: bool = False
    tools: ToolUse | None = None

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

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


def read_completion(body: Any) -> CompletionRequest:
    """Reads the body of POST /v1/completions.

    Raises:
        ApiError: a parameter that is missing, wrong or not supported.
    """
    fields = open_fields(body, _COMPLETION, _NEUTRAL_COMPLETION)
    prompts = read_prompts(fields.get("prompt"))
    max_tokens = _read_count(fields, "max_tokens")
    max_tokens = DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens
    logprobs, echo = read_completion_logprobs(fields), read_flag(fields, "echo")
    common = _read_common(fields, prompts[0], max_tokens, logprobs)
    check_choices(len(prompts), common["samples"])
    if echo and logprobs is not None:
        most = max(logprobs, common["prompt_logprobs"] or 0)
        common["generation"] = replace(common["generation"], prompt_logprobs=most)
    return CompletionRequest(prompts=prompts, echo=echo, **common)


def read_chat(body: Any) -> CompletionRequest:
    """Reads the body of POST /v1/chat/completions.

    Raises:
        ApiError: a parameter that is missing, wrong or not supported.
    """
    fields = open_fields(body, _CHAT, _NEUTRAL_CHAT)
    messages = read_messages(fields)
    max_tokens = _read_count(fields, "max_completion_tokens")
    older = _read_count(fields, "max_tokens")
    if max_tokens is not None and older is not None and max_tokens != older:
        raise ApiError("differs from max_completion_tokens", param="max_tokens")
    return CompletionRequest(
        messages=messages,
        variables=read_variables(fields),
        # SGLang's name and default.
        separates_reasoning=read_flag({"separate_reasoning": True} | fields, "separate_reasoning"),
        tools=read_tools(fields),
        **_read_common(
            fields, None, older if max_tokens is None else max_tokens, read_chat_logprobs(fields)
        ),
    )


def open_fields(
    body: Any, understood: set[str], neutral: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The fields that say something; null is as good as absent."""
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if name in understood:
            continue
        if name not in neutral:
            raise ApiError("this parameter is not supported", param=quoted(name).strip('"'))
        if not any(_same(value, allowed) for allowed in neutral[name]):
            raise ApiError(f"{quoted(value)} is not supported", param=name)
    return fields


def _read_common(
    fields: dict[str, Any], prompt: Prompt | None, max_tokens: int | None, logprobs: int | None
) -> dict[str, Any]:
    """Keywords of CompletionRequest that both kinds of request fill alike; a chat has no prompt."""
    model = fields.get("model")
    if not isinstance(model, str):
        raise ApiError("must be the name of a model", param="model")
    generation = GenerationRequest(
        grammar=read_structure(fields),
        prompt=prompt or "",
        max_tokens=max_tokens,
        sampling=_read_sampling(fields),
        stop_strings=_read_stops(fields.get("stop")),
        ignore_eos=read_flag(fields, "ignore_eos"),
        add_special_tokens=prompt is not None,  # a chat's template writes them itself
        streaming=read_flag(fields, "stream"),
        logprobs=logprobs,
        logprobs_mode=read_logprobs_mode(fields),
        prompt_logprobs=read_prompt_logprobs(fields),
        penalties=_read_penalties(fields),
        **_read_rules(fields),
    )
    usage = _read_stream_options(fields.get("stream_options"), generation.streaming)
    samples = _read_count(fields, "n") or 1
    check_choices(1, samples)
    return {
        "model": model,
        "generation": generation,
        "prompt_logprobs": generation.prompt_logprobs,
        "include_usage": usage,
        "samples": samples,
    }


def _read_sampling(fields: dict[str, Any]) -> SamplingParams:
    """OpenAI's defaults: temperature 1, and another seed for every request."""
    top_k = _read(fields, "top_k", "an integer", int)
    seed = _read(fields, "seed", "an integer", int)
    try:
        return SamplingParams(
            temperature=_read_number(fields, "temperature", 1.0),
            top_p=_read_number(fields, "top_p", 1.0),
            top_k=top_k,
            min_p=_read_number(fields, "min_p", 0.0),
            seed=secrets.randbits(63) if seed is None else seed,
        )
    except DflashError as error:
        raise ApiError(error.what, param=error.where) from error


def _read_penalties(fields: dict[str, Any]) -> Penalties:
    """What changes logits; `logit_bias` names tokens by their ids, as texts."""
    bias = fields.get("logit_bias", {})
    if not isinstance(bias, dict) or len(bias) > MOST_BIASED:
        raise ApiError(f"must be an object of at most {MOST_BIASED:,}", param="logit_bias")
    for token_id in bias:
        if not (token_id.isascii() and token_id.isdecimal() and len(token_id) < 10):
            raise ApiError(f"{quoted(token_id)} is no token id", param="logit_bias")
    try:
        return Penalties(
            frequency=_read_number(fields, "frequency_penalty", 0.0),
            presence=_read_number(fields, "presence_penalty", 0.0),
            repetition=_read_number(fields, "repetition_penalty", 1.0),
            bias=tuple((int(token_id), value) for token_id, value in bias.items()),
        )
    except DflashError as error:
        raise ApiError(error.what, param=error.where) from error


def _read_rules(fields: dict[str, Any]) -> dict[str, Any]:
    """Tokens that may not come, as vLLM's fields say it; of GenerationRequest."""
    ids, words = fields.get("allowed_token_ids"), fields.get("bad_words", [])
    if ids is not None and (
        not isinstance(ids, list) or any(type(one) is not int or one < 0 for one in ids)
    ):
        raise ApiError("must be a list of token ids", param="allowed_token_ids")
    if not isinstance(words, list) or len(words) > MOST_BAD:
        raise ApiError(f"must be a list of at most {MOST_BAD:,} texts", param="bad_words")
    allowed = None if ids is None else tuple(ids)
    try:
        TokenRules(allowed=allowed)
    except DflashError as error:
        raise ApiError(error.what, param=error.where) from error
    texts = tuple(check_text(word, "bad_words") for word in words)
    return {"allowed_token_ids": allowed, "bad_words": texts}


def _read_stops(stop: Any) -> tuple[str, ...]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise ApiError(f"must be a text or a list of at most {MAX_STOPS}", param="stop")
    texts = tuple(check_text(one, "stop") for one in stops)
    try:
        check_stop_strings(texts, "stop")
    except DflashError as error:
        raise ApiError(error.what, param="stop") from error
    return texts


def _read_stream_options(options: Any, stream: bool) -> bool:
    """Whether the stream's end has the usage."""
    if options is None:
        return False
    if not stream:
        raise ApiError("goes with stream: true only", param="stream_options")
    if not isinstance(options, dict):
        raise ApiError("must be an object", param="stream_options")
    # Obfuscation hides lengths from who listens on the wire; it adds nothing that is shown.
    unknown = options.keys() - {"include_usage", "include_obfuscation"}
    if unknown:
        name = quoted(min(unknown)).strip('"')
        raise ApiError("this parameter is not supported", param=f"stream_options.{name}")
    return read_flag(options, "include_usage")


def _read_count(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise ApiError(f"must be an integer of at least 1, not {quoted(value)}", param=name)
    return value


def _read_number(fields: dict[str, Any], name: str, default: float) -> float:
    value = _read({name: default} | fields, name, "a number", int, float)
    if value is None:
        raise ApiError("must be a number, not null", param=name)
    try:
        return float(value)
    except OverflowError:
        raise ApiError("is too large", param=name) from None


def read_flag(fields: dict[str, Any], name: str) -> bool:
    """A flag; absent is false."""
    return bool(_read(fields, name, "true or false", bool))


def _read(fields: dict[str, Any], name: str, what: str, *kinds: type) -> Any:
    """A value of one of the types, or None; true is no number."""
    value = fields.get(name)
    if value is not None and type(value) not in kinds:
        raise ApiError(f"must be {what}, not {quoted(value)}", param=name)
    return value


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON values: true is not 1, but 1.0 is."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)

"""A client of a served model: the LLM-API contract over gRPC, one stream per request."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np

from dflash_trt.decoding import (
    FinishReason,
    RequestResult,
    RequestStatistics,
    TokenLogprob,
)
from dflash_trt.decoding.request import ORIGINS, Continuation, TokenOrigin
from dflash_trt.errors import DflashError
from dflash_trt.sampling.token_rules import TokenRules
from dflash_trt.serving.client.errors import ServedModelError, read_error
from dflash_trt.serving.client.wire import (
    FIGURES,
    FLOW,
    MODEL,
    Response,
    WireClient,
    make_input,
)
from dflash_trt.text.grammar import Grammar

if TYPE_CHECKING:
    from tritonclient.grpc import InferInput

Prompt = str | tuple[int, ...]
"""A text or token ids."""

_LISTS = ("acceptance_histogram", "position_trials", "position_accepts")
_OPTIONAL = ("cached_prompt_tokens", "preemptions", "forced_tokens")
# Of INT32; beyond any context and any vocabulary, so that it limits nothing.
_LARGEST = 2**31 - 1
_LARGE_BYTES = 64 << 10  # read beside the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(Continuation):
    """What to continue and how; as `runtime.Request`, but with text.

    Args:
        prompt: not empty; token ids are taken as they are.
        add_special_tokens: False for a rendered chat template, which writes them itself.
        streaming: False asks for one answer at the end, which costs the server less.
        speculate: False decodes this request one token a step.
        allowed_token_ids: the only tokens that may come; None: all.
        bad_words: texts that may not come; the served model makes tokens of them.
        grammar: what the output must be; compiled by the served model.
        flow: requests of one share the model's slots with others as one would; None: it is its own.
    """

    prompt: Prompt
    add_special_tokens: bool = True
    streaming: bool = True
    speculate: bool = True
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    grammar: Grammar | None = None
    flow: str | None = None

    def __post_init__(self) -> None:
        Continuation.__post_init__(self)  # slots leave `super()` without its class
        TokenRules(allowed=self.allowed_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What a request's text grew by; the last one has the result.

    `token_ids` are the output's, special ones included; none where the server does not send them.
    `prompt_logprobs`, where wanted, come with the first one; its first token's is NaN. `origins`,
    where wanted, are as a `TokenEvent`'s.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    result: RequestResult | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    origins: tuple[TokenOrigin, ...] = ()


class ServedModel(WireClient):
    """The model `tensorrt_llm` of the server at `address` (host:port).

    A result's times are measured here, from submission.
    """

    _parameters: dict[str, str] | None = None

    async def ping(self) -> None:
        """Asks for nothing: to stop a request of a name that none has.

        The answer comes from the model's process, whatever its generator does."""
        inputs = [make_input("text_input", "BYTES", [""]), make_input("stop", "BOOL", [True])]
        async with aclosing(self.infer(inputs, {})) as responses:
            async for _ in responses:
                pass

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
        """Yields the output as it grows, in whole characters; ends as `WireClient.infer` does."""
        if await self._parameter("streaming_text") is None:
            what = f"its model {MODEL} is not one of `dflash-trt package`"
            fix = "package the bundle again, or use the server's OpenAI port"
            raise DflashError(what, where=self.address, fix=fix)
        submitted_at, first_at = time.perf_counter(), None
        deltas: list[TextDelta] = []
        failure: ServedModelError | None = None  # raised at the end: see wire.py
        is_whole = False
        inputs, parameters = _to_inputs(request), _to_parameters(request)
        async with aclosing(self.infer(inputs, parameters)) as responses:
            async for response in responses:
                if told := response.texts("error"):
                    failure = read_error(told, self.address)
                reason = response.text("finish_reason").decode(errors="replace")
                if reason == "cancelled":
                    failure = ServedModelError("was cancelled on the server", "cancelled")
                if failure is not None or not response.raw.get("text_output"):
                    continue  # the final response may be empty
                first_at = first_at or response.at
                read = partial(_read_delta, response, request)
                is_large = sum(map(len, response.raw.values())) > _LARGE_BYTES
                delta = await asyncio.to_thread(read) if is_large else read()
                deltas.append(delta)
                if reason in get_args(FinishReason):
                    is_whole = True
                    times = (first_at - submitted_at, time.perf_counter() - submitted_at)
                    logprobs = tuple(one for each in deltas for one in each.logprobs)
                    result = RequestResult(
                        request_id=0,
                        token_ids=tuple(one for each in deltas for one in each.token_ids),
                        text="".join(each.text for each in deltas),
                        finish_reason=cast(FinishReason, reason),
                        statistics=_read_statistics(response, *times),
                        logprobs=None if request.logprobs is None else logprobs,
                        prompt_logprobs=deltas[0].prompt_logprobs,
                    )
                    delta = replace(delta, result=result)
                yield delta
        if failure is not None:
            raise failure
        if not is_whole:
            raise ServedModelError("the answer ended without a last part", "failed", where=MODEL)

    async def has_chat_template(self) -> bool:
        """Whether chats are the model's way to be asked; its prompts are sent as they are."""
        return await self._parameter("chat_template") == "true"

    async def _parameter(self, name: str) -> str | None:
        """A parameter of the model's configuration."""
        if self._parameters is None:
            self._parameters = await self.read_parameters()
        return self._parameters.get(name)


def _to_inputs(request: GenerationRequest) -> list[InferInput]:
    """The request's tensors, shape [1] each: the model has max_batch_size 0."""
    sampling = request.sampling
    values: dict[str, tuple[str, list[Any]]] = {
        "text_input": ("BYTES", [request.prompt if isinstance(request.prompt, str) else ""]),
        "streaming": ("BOOL", [request.streaming]),
        "sampling_param_max_tokens": ("INT32", [min(request.max_tokens or _LARGEST, _LARGEST)]),
        "sampling_param_temperature": ("FP32", [_to_float32(sampling.temperature, "temperature")]),
        "sampling_param_top_p": ("FP32", [_to_float32(sampling.top_p, "top_p")]),
        "sampling_param_seed": ("UINT64", [sampling.seed]),
        "sampling_param_exclude_input_from_output": ("BOOL", [True]),
        "sampling_param_return_perf_metrics": ("BOOL", [True]),
        "return_finish_reason": ("BOOL", [True]),
    }
    if sampling.top_k is not None:
        values["sampling_param_top_k"] = ("INT32", [min(sampling.top_k, _LARGEST)])
    for kind in ("frequency", "presence"):
        if value := getattr(request.penalties, kind):
            values[f"sampling_param_{kind}_penalty"] = ("FP32", [value])
    if request.stop_strings:
        values["sampling_param_stop"] = ("BYTES", list(request.stop_strings))
    return [make_input(name, kind, items) for name, (kind, items) in values.items()]


def _to_float32(value: float, name: str) -> float:
    """`value`, or the least there is of FP32 instead of 0, which stands for something else."""
    if value > np.finfo(np.float32).max:
        raise DflashError(f"{value:g} is too large to be sent", where=name, usage=True)
    return max(value, float(np.finfo(np.float32).smallest_subnormal)) if value > 0 else value


def _to_parameters(request: GenerationRequest) -> dict[str, Any]:
    """What the contract has no tensors for; only what is not the default."""
    penalties, prompt, grammar = request.penalties, request.prompt, request.grammar
    mode, allowed = request.logprobs_mode, request.allowed_token_ids
    wanted: dict[str, Any] = {
        "streaming_text": "delta",
        "errors_as_output": True,
        "ignore_eos": request.ignore_eos or None,
        "min_tokens": min(request.min_tokens, _LARGEST) or None,
        "include_stop_str_in_output": request.include_stop_str_in_output or None,
        "skip_special_tokens": None if request.skip_special_tokens else False,
        "stop_token_ids": json.dumps(request.stop_token_ids) if request.stop_token_ids else None,
        "prompt_ids": None if isinstance(prompt, str) else json.dumps(prompt),
        "logprobs": request.logprobs,
        "logprobs_mode": None if request.logprobs is None or mode == "raw_logprobs" else mode,
        "prompt_logprobs": request.prompt_logprobs,
        "logit_bias": json.dumps(dict(penalties.bias)) if penalties.bias else None,
        "repetition_penalty": repr(penalties.repetition) if penalties.repetition != 1 else None,
        # As Penalties has them, not as the contract does.
        "own_penalties": True if penalties.frequency or penalties.presence else None,
        "min_p": repr(request.sampling.min_p) if request.sampling.min_p else None,
        "allowed_token_ids": None if allowed is None else json.dumps(allowed),
        "bad_words": json.dumps(request.bad_words) if request.bad_words else None,
        "grammar": None if grammar is None else json.dumps(asdict(grammar)),
        FLOW: request.flow,
        "speculate": None if request.speculate else False,
        "origins": request.origins or None,
        "add_special_tokens": None if request.add_special_tokens else False,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _read_delta(response: Response, request: GenerationRequest) -> TextDelta:
    """What a response adds to the answer; before a prompt's first token nothing is: NaN."""
    logprobs: tuple[TokenLogprob, ...] = ()
    of_prompt: tuple[TokenLogprob, ...] | None = None
    if request.logprobs is not None:
        logprobs = _join(response, response.numbers("logprob_ids"), "", request.logprobs)
    prompt_ids = response.numbers("prompt_logprob_ids")
    if request.prompt_logprobs is not None and prompt_ids:
        rest = _join(response, prompt_ids[1:], "prompt_", request.prompt_logprobs)
        of_prompt = (TokenLogprob(prompt_ids[0], math.nan), *rest)
    return TextDelta(
        text=response.text("text_output").decode(errors="replace"),
        token_ids=response.numbers("output_ids"),
        logprobs=logprobs,
        prompt_logprobs=of_prompt,
        origins=_read_origins(response),
    )


def _read_origins(response: Response) -> tuple[TokenOrigin, ...]:
    places, ids = response.numbers("origins"), response.numbers("origin_ids")
    if len(places) != len(ids) or not {*places} <= {*range(len(ORIGINS))}:
        raise ServedModelError("sends what are no origins", "failed", where=MODEL)
    return tuple(TokenOrigin(one, ORIGINS[place]) for one, place in zip(ids, places, strict=True))


def _read_statistics(response: Response, first_s: float, end_s: float) -> RequestStatistics:
    """The figures of the last response; seconds since the submission."""
    found: dict[str, Any] = {"time_to_first_token_s": first_s, "end_to_end_s": end_s}
    for name, field in FIGURES.items():
        numbers = response.numbers(name)
        if field in _LISTS:
            found[field] = numbers
        elif numbers:
            found[field] = numbers[0]
        elif field not in _OPTIONAL:
            fix = "serve a repository that `dflash-trt package` made"
            what = f"its last answer has no {name}"
            raise ServedModelError(what, "failed", where=MODEL, fix=fix)
    for grammar_us in response.numbers("grammar_us"):
        found["grammar_s"] = grammar_us / 1e6
    return RequestStatistics(**found)


def _join(
    response: Response, ids: tuple[int, ...], prefix: str, top: int
) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of tokens, `top` alternatives each."""
    values = response.reals(f"{prefix}logprobs")
    ranks = response.numbers(f"{prefix}logprob_ranks")
    top_ids = response.numbers(f"{prefix}top_logprob_ids")
    top_values = response.reals(f"{prefix}top_logprobs")
    most = len(top_ids) // len(ids) if ids else 0  # a vocabulary may have fewer than `top`
    fits = len(values) == len(ranks) == len(ids)
    if not (fits and len(ids) * most == len(top_ids) == len(top_values)) or most > top:
        raise ServedModelError("sends what are no log-probabilities", "failed", where=MODEL)
    found = []
    for at, (token_id, value, rank) in enumerate(zip(ids, values, ranks, strict=True)):
        its = slice(at * most, (at + 1) * most)
        found.append(TokenLogprob(token_id, value, top_ids[its], top_values[its], rank))
    return tuple(found)

"""A client of a served model: the LLM-API contract over gRPC, one stream per request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np

from dflash_trt.errors import DflashError, one_line
from dflash_trt.runtime import FinishReason, RequestResult, RequestStatistics, SamplingParams
from dflash_trt.serving.client.call import MODEL, ModelCall, make_input
from dflash_trt.serving.server.text_assembly import TextAssembler

if TYPE_CHECKING:
    from tritonclient.grpc import InferInput, InferResult
    from tritonclient.grpc.aio import InferenceServerClient

# Of INT32; beyond any context and any vocabulary, so that it limits nothing.
_LARGEST = 2**31 - 1
# What a repository of `dflash-trt package` can do beyond the contract.
_EXTENSIONS = {"streaming_text": "delta", "errors_as_output": True}

Problem = Literal["refused", "unavailable", "cancelled", "failed"]
_PROBLEMS: dict[str, Problem] = {
    "INVALID_ARGUMENT": "refused",
    "INVALID_ARG": "refused",
    "OUT_OF_RANGE": "refused",
    "UNIMPLEMENTED": "refused",
    "UNAVAILABLE": "unavailable",
    "RESOURCE_EXHAUSTED": "unavailable",
    "NOT_FOUND": "unavailable",
    "CANCELLED": "cancelled",
}

# What gRPC itself says, under the same status that a server gives to a full queue.
_NOBODY_THERE = (
    "errors resolving",
    "failed to connect",
    "socket closed",
    "connection re",
    "goaway",
    "recvmsg",
)


class ServedModelError(DflashError):
    """A request that a served model did not answer.

    `problem` says whose fault it was: `refused` (the request's), `unavailable` (no server, no
    model, or a full queue: try later), `cancelled` (somebody else ended it), `failed` (the
    server's).
    """

    def __init__(
        self, what: str, problem: Problem, *, where: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.problem: Problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What to continue and how; as `runtime.Request`, but with text.

    Args:
        prompt: not empty.
        max_tokens: most output tokens (>= 1); None is up to the end of the context.
        ignore_eos: do not end at the model's end-of-sequence ids.
        add_special_tokens: False for a rendered chat template, which writes them itself.
        streaming: False asks for one answer at the end, which costs the server less.

    Raises:
        DflashError: a stop string is empty (usage).
    """

    prompt: str
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    add_special_tokens: bool = True
    streaming: bool = True

    def __post_init__(self) -> None:
        if not all(self.stop_strings):
            raise DflashError("a stop string is empty", where="stop_strings", usage=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What a request's text grew by; the last one has the result.

    `token_ids` are the output's, special ones included; none where the server does not send them.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    result: RequestResult | None = None


class ServedModel:
    """The model `tensorrt_llm` of the server at `address` (host:port).

    Belongs to the event loop it was made in. The result's times are this client's
    own, from submission on.

    Raises:
        DflashError: tritonclient is not installed.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._client = _connect(address)
        self._parameters: dict[str, str] | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._closed = False

    async def close(self) -> None:
        """Ends the connection, once requests that were left have been stopped."""
        self._closed = True
        await asyncio.gather(*self._stopping, return_exceptions=True)
        await self._client.close()

    async def is_ready(self) -> bool:
        """Whether it would take a request now."""
        from tritonclient.utils import InferenceServerException

        try:
            return bool(await self._client.is_model_ready(MODEL))
        except InferenceServerException:
            return False

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
        """Yields the output as it grows, whole characters only.

        Closing the generator (`contextlib.aclosing`), or cancelling the task that waits in it,
        cancels the request on the server.

        Raises:
            ServedModelError: see its `problem`.
        """
        import grpc
        from tritonclient.utils import InferenceServerException

        # TensorRT-LLM's own model streams all text so far and cannot be asked for less.
        cumulative = await self._parameter("streaming_text") is None
        assembler = TextAssembler(cumulative=cumulative)
        submitted_at, first_at = time.perf_counter(), None
        token_ids: tuple[int, ...] = ()
        shown = 0
        result: RequestResult | None = None
        parameters = _to_parameters(request) | ({} if cumulative else _EXTENSIONS)
        call = ModelCall(self._client, _to_inputs(request), parameters)
        try:
            while (received := await call.receive()) is not None:
                response, error = received
                if error is not None:
                    raise self._explain(_guess_status(error.message()), error.message())
                assert response is not None
                if failure := _read_failure(response):
                    raise self._explain(*failure)
                answer = _Answer.read(response)
                if answer is None:  # the empty final response
                    continue
                if first_at is None:
                    first_at = time.perf_counter()
                if answer.finish_reason == "cancelled":
                    raise ServedModelError("was cancelled on the server", "cancelled")
                final = answer.finish_reason is not None
                text = _push(assembler, answer.text, final)
                token_ids = answer.token_ids if cumulative else token_ids + answer.token_ids
                if final:
                    times = (first_at - submitted_at, time.perf_counter() - submitted_at)
                    result = answer.to_result(assembler.text, token_ids, *times)
                if text or final:
                    newest, shown = token_ids[shown:], len(token_ids)
                    yield TextDelta(text=text, token_ids=newest, result=result)
        except grpc.aio.AioRpcError as error:
            raise self._explain(error.code().name, error.details()) from None
        except InferenceServerException as error:
            raise self._explain(error.status(), error.message()) from None
        finally:
            if not call.ended and self._closed:
                call.cancel()
            elif not call.ended:
                # Apart: this generator may be closed where nothing can be awaited any more.
                stopping = asyncio.create_task(call.stop())
                self._stopping.add(stopping)
                stopping.add_done_callback(self._stopping.discard)
        if result is None:
            raise ServedModelError("the answer ended without a last part", "failed", where=MODEL)

    async def has_chat_template(self) -> bool:
        """Whether chats are the model's way to be asked; its prompts are sent as they are.

        Raises:
            ServedModelError: no server, or no model.
        """
        return await self._parameter("chat_template") == "true"

    async def _parameter(self, name: str) -> str | None:
        """A parameter of the model's configuration."""
        from tritonclient.utils import InferenceServerException

        if self._parameters is None:
            try:
                answer = await self._client.get_model_config(MODEL, as_json=True)
            except InferenceServerException as error:
                raise self._explain(error.status(), error.message()) from None
            self._parameters = {
                key: value["string_value"]
                for key, value in answer["config"].get("parameters", {}).items()
            }
        return self._parameters.get(name)

    def _explain(self, status: str | None, message: str | None) -> ServedModelError:
        name = (status or "").removeprefix("StatusCode.")
        problem = _PROBLEMS.get(name, "failed")
        what = one_line(message or name or "no reason given")
        if problem == "unavailable" and any(sign in what.lower() for sign in _NOBODY_THERE):
            return ServedModelError(
                "no server answers there (any more)",
                problem,
                where=self.address,
                fix="start one with `dflash-trt serve`",
            )
        return ServedModelError(what, problem, where=self.address)


def _connect(address: str) -> InferenceServerClient:
    try:
        from tritonclient.grpc.aio import InferenceServerClient
    except ImportError as error:
        raise DflashError(
            f"a client needs tritonclient ({one_line(error)})",
            fix="pip install 'dflash-trt[serve]'",
        ) from error
    return InferenceServerClient(address)


def _to_inputs(request: GenerationRequest) -> list[InferInput]:
    """The request's tensors, shape [1] each: the model has max_batch_size 0."""
    sampling = request.sampling
    values: dict[str, tuple[str, list[Any]]] = {
        "text_input": ("BYTES", [request.prompt.encode()]),
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
    if request.stop_strings:
        stops = [stop.encode() for stop in request.stop_strings]
        values["sampling_param_stop"] = ("BYTES", stops)
    return [make_input(name, kind, items) for name, (kind, items) in values.items()]


def _to_float32(value: float, name: str) -> float:
    """`value`, or the least there is of FP32 instead of 0, which stands for something else.

    Raises:
        DflashError: FP32 does not reach so far (usage).
    """
    if value > np.finfo(np.float32).max:
        raise DflashError(f"{value:g} is too large to be sent", where=name, usage=True)
    return max(value, float(np.finfo(np.float32).smallest_subnormal)) if value > 0 else value


def _to_parameters(request: GenerationRequest) -> dict[str, Any]:
    """What the contract has no tensors for; only what is not the default."""
    wanted: dict[str, Any] = {}
    if request.ignore_eos:
        wanted["ignore_eos"] = True
    if not request.add_special_tokens:
        wanted["add_special_tokens"] = False
    return wanted


def _guess_status(message: str) -> str:
    """The status of an error that comes in a stream, where only its text does."""
    if any(sign in message for sign in ("unknown model", "is not ready", "no available versions")):
        return "UNAVAILABLE"
    # The server's words when a model process has failed; else it refuses the request.
    failed = ("Failed to process the request", "Stub process", "Internal")
    return "INTERNAL" if any(sign in message for sign in failed) else "INVALID_ARGUMENT"


def _read_failure(response: InferResult) -> tuple[str, str] | None:
    """The status and the text of an error that came as an output."""
    error = response.as_numpy("error")
    if error is None or error.size != 2:
        return None
    status, message = (item.decode(errors="replace") for item in error.flat)
    return status, message


def _push(assembler: TextAssembler, text: str, final: bool) -> str:
    try:
        return assembler.push(text, final=final)
    except ValueError as error:
        raise ServedModelError(str(error), "failed", where=MODEL) from None


@dataclass(frozen=True, slots=True)
class _Answer:
    """One response of the model; the numbers are there in the last."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    response: InferResult

    @staticmethod
    def read(response: InferResult) -> _Answer | None:
        """None for a response without outputs."""
        texts = response.as_numpy("text_output")
        if texts is None or not texts.size:
            return None
        reason = response.as_numpy("finish_reason")
        named = reason.flat[0].decode() if reason is not None and reason.size else ""
        return _Answer(
            texts.flat[0].decode(errors="replace"),
            _numbers(response, "output_ids"),
            cast(FinishReason, named) if named in get_args(FinishReason) else None,
            response,
        )

    def to_result(
        self, text: str, token_ids: tuple[int, ...], first_s: float, end_s: float
    ) -> RequestResult:
        """`text` and `token_ids` are the whole output's; seconds since the submission."""
        assert self.finish_reason is not None
        return RequestResult(
            request_id=0,
            token_ids=token_ids,
            text=text,
            finish_reason=self.finish_reason,
            statistics=RequestStatistics(
                prompt_tokens=self._number("num_input_tokens"),
                output_tokens=self._number("num_output_tokens"),
                cached_prompt_tokens=self._find_number("cached_prompt_tokens"),
                preemptions=self._find_number("preemptions"),
                steps=self._number("num_verify_steps"),
                drafted_tokens=self._number("total_draft_tokens"),
                accepted_tokens=self._number("total_accepted_draft_tokens"),
                acceptance_histogram=_numbers(self.response, "acceptance_histogram"),
                position_trials=_numbers(self.response, "position_trials"),
                position_accepts=_numbers(self.response, "position_accepts"),
                time_to_first_token_s=first_s,
                end_to_end_s=end_s,
            ),
        )

    def _find_number(self, name: str) -> int | None:
        values = _numbers(self.response, name)
        return values[0] if values else None

    def _number(self, name: str) -> int:
        value = self._find_number(name)
        if value is None:
            raise ServedModelError(
                f"its last answer has no {name}",
                "failed",
                where=MODEL,
                fix="serve a repository that `dflash-trt package` made",
            )
        return value


def _numbers(response: InferResult, name: str) -> tuple[int, ...]:
    array = response.as_numpy(name)
    return () if array is None else tuple(int(item) for item in array.flat)

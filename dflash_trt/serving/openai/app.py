"""OpenAI's completion API over HTTP, in front of a served model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dflash_trt.errors import DflashError
from dflash_trt.runtime import RequestResult
from dflash_trt.serving.client.client import GenerationRequest, Prompt, TextDelta
from dflash_trt.serving.openai.access import counted
from dflash_trt.serving.openai.answers import AnswerReader, open_reader
from dflash_trt.serving.openai.body import BodyReader
from dflash_trt.serving.openai.errors import ApiError, as_api_error
from dflash_trt.serving.openai.figures import FrontFigures
from dflash_trt.serving.openai.merging import merge
from dflash_trt.serving.openai.messages import check_variables
from dflash_trt.serving.openai.reply import ReplyWriter, error_event
from dflash_trt.serving.openai.request import CompletionRequest, read_chat, read_completion
from dflash_trt.serving.openai.tokenization import (
    TokenizeRequest,
    detokenize,
    read_detokenize,
    read_tokenize,
    tokenize,
)
from dflash_trt.text.chat import ChatRenderer
from dflash_trt.text.grammar import Grammar
from dflash_trt.text.harmony import HarmonyFormat
from dflash_trt.text.thoughts import AnswerFormat, ThoughtFormat
from dflash_trt.text.token_bytes import TokenBytes
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.text.tokenizer_calls import decode
from dflash_trt.text.tool_grammars import bind_answer
from dflash_trt.text.tools import ToolFormat, ToolUse

_NOT_TEXT = "text is all that the model takes and makes"
_NO_STORE = "nothing is kept of a request after its answer"
_NO_SCORES = "the model makes text, no vectors and no scores; its logprobs are in completions"
# Endpoints of OpenAI's and vLLM's servers, and why they are missing.
ABSENT = {
    "/v1/responses": "ask /v1/chat/completions (in openai-agents OpenAIChatCompletionsModel)",
    "/v1/embeddings": _NO_SCORES,
    "/v1/moderations": _NO_SCORES,
    "/v1/images": _NOT_TEXT,
    "/v1/audio": _NOT_TEXT,
    "/v1/videos": _NOT_TEXT,
    "/v1/realtime": _NOT_TEXT,
    "/v1/files": _NO_STORE,
    "/v1/uploads": _NO_STORE,
    "/v1/batches": "send requests together; the model batches what runs at a time",
    "/v1/assistants": _NO_STORE,
    "/v1/threads": _NO_STORE,
    "/v1/conversations": _NO_STORE,
    "/v1/vector_stores": _NO_STORE,
    "/v1/fine_tuning": "dflash-trt train-draft trains drafts, from the command line",
    "/v1/messages": "that is Anthropic's API; ask /v1/chat/completions",
    "/pooling": _NO_SCORES,
    "/classify": _NO_SCORES,
    "/score": _NO_SCORES,
    "/rerank": _NO_SCORES,
}

T = TypeVar("T")
ChoiceDeltas = AsyncGenerator[tuple[int, TextDelta], None]


class Upstream(Protocol):
    """What answers the requests: a `ServedModel`, or whichever of them is there now."""

    def stream(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]: ...

    async def is_ready(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class OpenAiApp:
    """The routes of the API; `models` are the names it answers to. Without a renderer, no chats.

    `tokenizer` and `max_seq_len` are those of the model.

    `figures` are for Prometheus; requests come through a `Gate`, which counts them there.
    `answers` tells answers from reasoning in the chats of a model that marks it.
    """

    models: tuple[str, ...]
    upstream: Upstream
    renderer: ChatRenderer | None
    tokenizer: BundleTokenizer
    max_seq_len: int
    answers: AnswerFormat | None = None
    figures: FrontFigures = field(default_factory=FrontFigures)
    render_thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="chat-template")
    )
    token_thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="tokenize")
    )
    bodies: BodyReader = field(default_factory=BodyReader)
    created: int = field(default_factory=lambda: int(time.time()))
    token_bytes: TokenBytes = field(init=False)
    tool_format: ToolFormat | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_bytes", TokenBytes(self.tokenizer.core))
        if self.renderer is not None:
            template, core = self.renderer.template, self.tokenizer.core
            form = ToolFormat.find(template, core, harmony=self.is_harmony)
            object.__setattr__(self, "tool_format", form)

    @property
    def is_harmony(self) -> bool:
        """Whether the model has harmony's channels."""
        return isinstance(self.answers, HarmonyFormat)

    def starlette(self) -> Starlette:
        """The application."""
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self.show_metrics),
                Route("/v1/models", self.list_models),
                Route("/v1/models/{model:path}", self.show_model),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                *(
                    Route(path + rest, _refuse_endpoint, methods=["GET", "POST", "DELETE"])
                    for path in ABSENT
                    for rest in ("", "/{rest:path}")
                ),
            ],
            exception_handlers={
                DflashError: _answer_error,
                HTTPException: _answer_http_error,
                ClientDisconnect: _answer_nobody,
                Exception: _answer_surprise,
            },
        )

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if await self.upstream.is_ready() else 503)

    async def list_models(self, request: Request) -> Response:
        await self._check_ready()
        return JSONResponse({"object": "list", "data": [*map(self._describe_model, self.models)]})

    async def show_model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        await self._check_ready()
        return JSONResponse(self._describe_model(request.path_params["model"]))

    async def show_metrics(self, request: Request) -> Response:
        ready = await self.upstream.is_ready()
        text = await asyncio.to_thread(self.figures.text, ready=ready)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def complete(self, request: Request) -> Response:
        asked = await self.bodies.read(request, read_completion)
        self._check_model(asked.model)
        return await self._answer(request, asked)

    async def chat(self, request: Request) -> Response:
        asked = await self.bodies.read(request, read_chat)
        self._check_model(asked.model)
        if self.is_harmony and not asked.separates_reasoning:
            raise ApiError("channels are always told apart", param="separate_reasoning")
        prompt = await _unless_gone(request, self._render(asked.model, asked))
        grammar = self._bind(asked.tools, asked.generation.grammar, prompt)
        generation = replace(asked.generation, prompt=prompt, grammar=grammar)
        return await self._answer(request, replace(asked, generation=generation))

    async def tokenize(self, request: Request) -> Response:
        asked = await self.bodies.read(request, read_tokenize)
        model = self._check_model(asked.model)
        text = asked.prompt
        if asked.messages:
            text = await _unless_gone(request, self._render(model, asked))
        return await self._in_token_thread(tokenize, asked, text, self.max_seq_len)

    async def detokenize(self, request: Request) -> Response:
        asked = await self.bodies.read(request, read_detokenize)
        self._check_model(asked.model)
        return await self._in_token_thread(detokenize, asked)

    async def _in_token_thread(self, work: Callable[..., dict[str, Any]], *given: Any) -> Response:
        def answer() -> Response:
            return JSONResponse(work(self.tokenizer, *given))

        return await asyncio.get_running_loop().run_in_executor(self.token_thread, answer)

    async def _answer(self, request: Request, asked: CompletionRequest) -> Response:
        outputs = asked.outputs()
        leads = [await self._read_prompt(one.prompt) if asked.echo else "" for one in outputs]
        readers = [self._open_reader(asked) for _ in outputs]
        reasons = asked.separates_reasoning and self.answers is not None
        writer = ReplyWriter(asked, readers, leads, self.token_bytes, reasons=reasons)
        record, samples = request.state.record, asked.samples
        deltas = merge(
            [
                counted(self.upstream.stream(one), record, counts_prompt=index % samples == 0)
                for index, one in enumerate(outputs)
            ]
        )
        if not asked.generation.streaming:
            results = await _unless_gone(request, _finish(deltas, len(outputs)))
            return JSONResponse(writer.whole(results))
        # Not before the first answer is it known which status the reply has.
        first = await _unless_gone(request, anext(deltas))
        return _EventStream(deltas, _events(first, deltas, writer))

    def _open_reader(self, asked: CompletionRequest) -> AnswerReader:
        if not asked.is_chat:
            return AnswerReader()
        core, generation = self.tokenizer.core, asked.generation
        answers: AnswerFormat | frozenset[int] | None = self.answers
        if isinstance(answers, ThoughtFormat) and not asked.separates_reasoning:
            answers = answers.marks_shown
        form, stops, prompt = self.tool_format, generation.stop_strings, generation.prompt
        return open_reader(core, stops, answers, form, asked.tools, prompt)

    def _bind(self, use: ToolUse | None, answer: Grammar | None, prompt: str) -> Grammar | None:
        """The grammar of a chat's answer, which stands behind its reasoning."""
        answers = self.answers
        thought = answers.grammar(prompt) if isinstance(answers, ThoughtFormat) else ""
        harmony = self.is_harmony
        try:
            return bind_answer(self.tool_format, use, answer, harmony=harmony, thought=thought)
        except DflashError as error:
            param = "response_format" if use is None else "tools"
            raise ApiError(error.what, param=param) from error

    async def _read_prompt(self, prompt: Prompt) -> str:
        """The text of a prompt."""
        if isinstance(prompt, str):
            return prompt
        return await asyncio.get_running_loop().run_in_executor(
            self.token_thread, decode, self.tokenizer.core, prompt
        )

    async def _render(self, model: str, asked: CompletionRequest | TokenizeRequest) -> str:
        if self.renderer is None:
            what = f"{model} has no chat template; use /v1/completions"
            raise ApiError(what, param="messages")
        check_variables(model, self.renderer, asked.variables)
        messages, use, variables = asked.messages, asked.tools, dict(asked.variables)
        if self.tool_format is not None:
            messages, tools = self.tool_format.prepare(messages, use)
            variables |= {} if tools is None else {"tools": tools}
        elif use is not None:
            what = f"the chat template of {model} has calls in no form that is known here"
            raise ApiError(what, param="tools")
        prompt = await asyncio.get_running_loop().run_in_executor(
            self.render_thread, self.renderer.render, messages, variables
        )
        if not prompt:
            raise ApiError("the chat template makes no text of them", param="messages")
        return prompt

    def _check_model(self, name: str | None) -> str:
        """The name, or the model's first one where a client may leave it out."""
        if name is None:
            return self.models[0]
        if name not in self.models:
            what = f"there is no such model here, only {', '.join(map(repr, self.models))}"
            raise ApiError(what, status=404, param="model", code="model_not_found")
        return name

    async def _check_ready(self) -> None:
        if not await self.upstream.is_ready():
            raise ApiError("the model is not ready", status=503, code="unavailable")

    def _describe_model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "dflash-trt",
        }


class _EventStream(StreamingResponse):
    """A stream of server-sent events; the request ends with it, however it ends."""

    media_type = "text/event-stream"

    def __init__(self, deltas: ChoiceDeltas, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._deltas = deltas
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._deltas), aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _events(
    first: tuple[int, TextDelta], deltas: ChoiceDeltas, writer: ReplyWriter
) -> AsyncGenerator[bytes, None]:
    """The reply's events; an error after the first of them is an event too."""
    yield writer.opening() + writer.piece(*first)
    try:
        async for index, delta in deltas:
            yield writer.piece(index, delta)
    except DflashError as error:
        yield error_event(error)


async def _finish(deltas: ChoiceDeltas, count: int) -> list[RequestResult]:
    results: dict[int, RequestResult] = {}
    async with aclosing(deltas):
        async for index, delta in deltas:
            if delta.result is not None:
                results[index] = delta.result
    return [results[index] for index in range(count)]  # whole, or the stream had raised


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled when the client hangs up.

    Raises:
        ClientDisconnect: it did.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _wait_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refuse_endpoint(request: Request) -> Response:
    path = next(one for one in ABSENT if f"{request.url.path}/".startswith(f"{one}/"))
    answer = ApiError(f"{path} is not there: {ABSENT[path]}", status=404)
    return JSONResponse(answer.to_json(), 404)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, DflashError)
    answer = as_api_error(error)
    return JSONResponse(answer.to_json(), answer.status, headers=answer.headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = ApiError(f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(answer.to_json(), error.status_code, headers=error.headers)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # as nginx logs it; the client has gone


async def _answer_surprise(request: Request, error: Exception) -> Response:
    return JSONResponse(ApiError("internal error", status=500).to_json(), 500)

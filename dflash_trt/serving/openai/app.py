"""OpenAI's completion API over HTTP, in front of a served model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dflash_trt.bundle.sampling_defaults import SamplingDefaults
from dflash_trt.errors import DflashError
from dflash_trt.serving.client.client import GenerationRequest, Prompt, TextDelta
from dflash_trt.serving.openai.answer_reader import AnswerReader, open_reader
from dflash_trt.serving.openai.body import BodyReader, read_body
from dflash_trt.serving.openai.chat_request import CompletionRequest, read_chat, read_completion
from dflash_trt.serving.openai.errors import ApiError, as_api_error
from dflash_trt.serving.openai.figures import FrontFigures
from dflash_trt.serving.openai.large import ReplyDesk, check_places
from dflash_trt.serving.openai.messages import Conversation, check_variables, read_conversation
from dflash_trt.serving.openai.page import join_page
from dflash_trt.serving.openai.reply import ReplyWriter
from dflash_trt.serving.openai.responses_reply import ResponseWriter
from dflash_trt.serving.openai.responses_request import read_response, rename
from dflash_trt.serving.openai.streams import EventStream, merge, unless_gone, write_whole
from dflash_trt.serving.openai.tokenization import (
    DetokenizeRequest,
    describe_tokenizer,
    detokenize,
    encode_prompts,
    read_tokenize,
    tokenize,
)
from dflash_trt.text.grammar import Grammar
from dflash_trt.text.harmony import HarmonyFormat
from dflash_trt.text.thoughts import AnswerFormat, ThoughtFormat, find_format
from dflash_trt.text.tokenizer import BundleTokenizer, TokenBytes
from dflash_trt.text.tokenizer_calls import decode
from dflash_trt.text.tool_grammars import bind_answer
from dflash_trt.text.tools import ToolFormat, ToolUse
from dflash_trt.version import __version__

T = TypeVar("T")
Writing = Callable[..., ReplyWriter]


class Upstream(Protocol):
    """What answers the requests: a `ServedModel`, or whichever of them is there now."""

    def stream(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]: ...

    async def is_ready(self) -> bool: ...


class OpenAiApp:
    """The routes of the API; `models` are the names it answers to.

    Without a chat template in `tokenizer` there are no chats. Requests come through a `Gate`;
    `defaults` are used where they state nothing.
    """

    def __init__(
        self,
        models: tuple[str, ...],
        upstream: Upstream,
        tokenizer: BundleTokenizer,
        max_seq_len: int,
        figures: FrontFigures,
        defaults: SamplingDefaults | None = None,
    ) -> None:
        self._read_completion = partial(read_completion, defaults=defaults)
        self._read_chat = partial(read_chat, defaults=defaults)
        self._read_response = partial(read_response, defaults=defaults)
        self.models, self.upstream, self.figures = models, upstream, figures
        self.tokenizer, self.max_seq_len = tokenizer, max_seq_len
        self.renderer = renderer = tokenizer.open_renderer()
        self.answers: AnswerFormat | None = find_format(tokenizer.core)
        # A hostile template holds up no tokens, nor the other way round.
        self.render_thread = ThreadPoolExecutor(1, thread_name_prefix="chat-template")
        self.token_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self.bodies, self.desk, self.created = BodyReader(), ReplyDesk(), int(time.time())
        self.token_bytes = TokenBytes(tokenizer.core)
        self.is_harmony = harmony = isinstance(self.answers, HarmonyFormat)
        self.tool_format: ToolFormat | None = None
        if renderer is not None:
            template = renderer.find(tools=True)
            self.tool_format = ToolFormat.find(template, tokenizer.core, harmony=harmony)

    def starlette(self, *, page: bool = True) -> Starlette:
        """The application, with a page at `/` or without."""
        return Starlette(
            routes=[
                *([Route("/", self.show_page)] if page else []),
                Route("/health", self.health),
                Route("/ping", self.health, methods=["GET", "POST"]),
                Route("/metrics", self.show_metrics),
                Route("/version", self.show_version),
                Route("/load", self.show_load),
                Route("/tokenizer_info", self.show_tokenizer),
                Route("/v1/models", self.list_models),
                Route("/v1/models/{model:path}", self.list_models),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/responses", self.respond, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
            ],
            exception_handlers=dict.fromkeys(
                (DflashError, HTTPException, ClientDisconnect, Exception), _answer_error
            ),
        )

    async def show_page(self, request: Request) -> Response:
        page, headers = join_page()
        return Response(page, headers=headers, media_type="text/html")

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if await self.upstream.is_ready() else 503)

    async def list_models(self, request: Request) -> Response:
        """All models, or the one that the path names."""
        asked = request.path_params.get("model")
        names = self.models if asked is None else (self._check_model(asked),)
        if not await self.upstream.is_ready():
            raise ApiError("the model is not ready", status=503, code="unavailable")
        about = {"object": "model", "created": self.created, "owned_by": "dflash-trt"}
        about |= {"max_model_len": self.max_seq_len}
        listed = [{"id": name, **about} for name in names]
        return JSONResponse({"object": "list", "data": listed} if asked is None else listed[0])

    async def show_metrics(self, request: Request) -> Response:
        ready = await self.upstream.is_ready()
        text = await asyncio.to_thread(self.figures.text, ready=ready)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def show_version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def show_load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self.figures.load})

    async def show_tokenizer(self, request: Request) -> Response:
        return JSONResponse(describe_tokenizer(self.tokenizer))

    async def complete(self, request: Request) -> Response:
        asked = await self.bodies.read(request, self._read_completion)
        self._check_model(asked.body.model)
        return await self._answer(request, asked)

    async def chat(self, request: Request) -> Response:
        return await self._converse(request, await self.bodies.read(request, self._read_chat))

    async def respond(self, request: Request) -> Response:
        asked = await self.bodies.read(request, self._read_response)
        try:
            writing = partial(ResponseWriter, asked.about)
            return await self._converse(request, asked.chat, writing)
        except ApiError as error:
            raise rename(error) from error

    async def _converse(
        self, request: Request, asked: CompletionRequest, writing: Writing = ReplyWriter
    ) -> Response:
        self._check_model(asked.body.model)
        if self.is_harmony and not asked.body.separate_reasoning:
            raise ApiError("channels are always told apart", param="separate_reasoning")
        assert asked.chat is not None
        prompt = await unless_gone(request, self._render(asked.body.model, asked.chat))
        grammar = self._bind(asked.chat.tools, asked.generation.grammar, prompt)
        generation = replace(asked.generation, prompt=prompt, grammar=grammar)
        return await self._answer(request, replace(asked, generation=generation), writing)

    async def tokenize(self, request: Request) -> Response:
        asked = await self.bodies.read(request, read_tokenize)
        model = self._check_model(asked.model)
        text = asked.prompt or ""
        if asked.messages is not None:
            chat = read_conversation(asked.messages, asked)
            text = await unless_gone(request, self._render(model, chat))
        given = (self.tokenizer, asked, text, self.max_seq_len)
        return JSONResponse(await self._with_tokens(tokenize, *given))

    async def detokenize(self, request: Request) -> Response:
        asked = await self.bodies.read(request, partial(read_body, DetokenizeRequest))
        self._check_model(asked.model)
        return JSONResponse(await self._with_tokens(detokenize, self.tokenizer, asked))

    async def _with_tokens(self, work: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.token_thread, work, *given)

    async def _answer(
        self, request: Request, asked: CompletionRequest, writing: Writing = ReplyWriter
    ) -> Response:
        shown = asked
        if asked.needs_ids:
            asked = await self._with_ids(asked)
            shown = shown if asked.body.truncate_prompt_tokens is None else asked
        outputs, core, separates = (
            asked.outputs(),
            self.tokenizer.core,
            asked.body.separate_reasoning,
        )
        check_places(outputs, asked.body.prompt_logprobs)
        request.state.take_places(len(outputs))
        echoed = shown.outputs() if asked.body.echo else []
        leads = [await self._read_prompt(one.prompt) for one in echoed] or [""] * len(outputs)
        readers = [AnswerReader() for _ in outputs]
        if (chat := asked.chat) is not None:
            given = (core, asked.generation, self.answers, self.tool_format, chat.tools)
            readers = [open_reader(*given, separates=separates) for _ in outputs]
        reasons, record = separates and self.answers is not None, request.state.record
        writer = writing(asked, readers, leads, self.token_bytes, record, reasons=reasons)
        deltas = merge([self.upstream.stream(one) for one in outputs])
        if not asked.generation.streaming:
            reply = write_whole(deltas, len(outputs), writer, self.desk)
            return await unless_gone(request, reply)
        # A refusal has a status, which is known when there is an answer, or has not been for long.
        first = await unless_gone(request, anext(deltas))
        return EventStream(first, deltas, writer, self.desk)

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

    async def _with_ids(self, asked: CompletionRequest) -> CompletionRequest:
        """The request with token ids as its prompts."""
        given = asked.prompts or (asked.generation.prompt,)
        encode = partial(encode_prompts, special=asked.generation.add_special_tokens)
        ids = await self._with_tokens(encode, self.tokenizer, given)
        return asked.with_ids(ids, self.max_seq_len)

    async def _read_prompt(self, prompt: Prompt) -> str:
        """The text of a prompt."""
        if isinstance(prompt, str):
            return prompt
        return await self._with_tokens(decode, self.tokenizer.core, prompt)

    async def _render(self, model: str, chat: Conversation) -> str:
        if self.renderer is None:
            what = f"{model} has no chat template; use /v1/completions"
            raise ApiError(what, param="messages")
        check_variables(model, self.renderer, chat)
        messages, use, variables = chat.messages, chat.tools, dict(chat.variables)
        if self.tool_format is not None:
            messages, tools = self.tool_format.prepare(messages, use)
            variables |= {} if tools is None else {"tools": tools}
        elif use is not None:
            what = f"the chat template of {model} has calls in no form that is known here"
            raise ApiError(what, param="tools")
        if not chat.opens:
            variables["add_generation_prompt"] = False
        prompt = await asyncio.get_running_loop().run_in_executor(
            self.render_thread, self.renderer.render, messages, variables
        )
        prompt = chat.cut(prompt)
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


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # as nginx logs it; the client has gone
    if isinstance(error, HTTPException):
        answer = ApiError(f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(answer.to_json(), error.status_code, headers=error.headers)
    return JSONResponse(**as_api_error(error).to_response())

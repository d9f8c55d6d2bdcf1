"""The OpenAI front in a thread, before a model that says what a test tells it to."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
from tokenizers import Tokenizer

from dflash_trt.decoding import FinishReason, RequestResult, RequestStatistics
from dflash_trt.serving.client.client import GenerationRequest, TextDelta
from dflash_trt.serving.openai.front_options import FrontOptions
from dflash_trt.serving.openai.server import OpenAiServer
from dflash_trt.text.tokenizer import BundleTokenizer
from tests.serving.served import fetch
from tests.waiting import PATIENCE_S, wait_until


def result_of(
    text: str, reason: FinishReason = "length", cached: int | None = None
) -> RequestResult:
    """A result with recognisable counts: 7 tokens of prompt, 10 of output, 6 of 20 drafts kept."""
    return RequestResult(
        request_id=0,
        token_ids=(),
        text=text,
        finish_reason=reason,
        statistics=RequestStatistics(
            prompt_tokens=7,
            output_tokens=10,
            cached_prompt_tokens=cached,
            steps=4,
            drafted_tokens=20,
            accepted_tokens=6,
        ),
    )


@dataclass
class ScriptedModel:
    """Answers every request with `pieces`; remembers what was asked, and how it ended.

    Args:
        pieces: the text, piece by piece; an exception among them is raised at its place.
        token_ids: of each piece, for a front that reads them.
        endless: after the pieces, more and more of them.
        reason: why every answer ends.
        cached: prompt tokens from a prefix cache, where there is one.
        gate: what the first piece waits for.
    """

    pieces: Sequence[str | Exception] = ("one ", "two")
    token_ids: Sequence[tuple[int, ...]] = ()
    endless: bool = False
    reason: FinishReason = "length"
    cached: int | None = None
    gate: threading.Event | None = None
    ready: bool = True
    asked: list[GenerationRequest] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    changed: threading.Event = field(default_factory=threading.Event)

    async def is_ready(self) -> bool:
        return self.ready

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
        self.asked.append(request)
        how = "cancelled"
        text = ""
        try:
            while self.gate is not None and not self.gate.is_set():
                await asyncio.sleep(0.001)
            for index, piece in enumerate(self.pieces):
                await asyncio.sleep(0)
                if isinstance(piece, Exception):
                    how = "failed"
                    raise piece
                text += piece
                if request.streaming:
                    ids = self.token_ids[index] if self.token_ids else ()
                    yield TextDelta(text=piece, token_ids=ids)
            while self.endless:
                await asyncio.sleep(0.01)
                if request.streaming:
                    yield TextDelta(text="more ")
            result = replace(
                result_of(text, self.reason, self.cached), token_ids=sum(self.token_ids, ())
            )
            yield TextDelta(text="" if request.streaming else text, result=result)
            how = "done"
        finally:
            self.finished.append(how)
            self.changed.set()

    def wait_finished(self) -> str:
        """How the next request ended."""
        assert self.changed.wait(PATIENCE_S)
        self.changed.clear()
        return self.finished[-1]


class Switch:
    """An upstream that is another model for every test, behind one front."""

    model = ScriptedModel()

    async def is_ready(self) -> bool:
        return self.model.ready

    def stream(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
        return self.model.stream(request)


Front = Callable[[ScriptedModel], str]


@contextmanager
def switching_front(
    tokenizer_folder: Path,
    options: FrontOptions = FrontOptions(),  # noqa: B008
    **given: Any,
) -> Generator[Front, None, None]:
    """Puts a model behind one front that stays; returns the front's address, http://host:port.

    `given` are further arguments of `OpenAiServer`.
    """
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        tokenizer, switch = BundleTokenizer(tokenizer_folder), Switch()
        server = OpenAiServer("demo", switch, tokenizer, 512, bound, options, **given)
        thread = threading.Thread(target=lambda: asyncio.run(server.run()), daemon=True)
        thread.start()
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started

        def put(model: ScriptedModel) -> str:
            switch.model = model
            return f"{options.scheme}://127.0.0.1:{bound.getsockname()[1]}"

        try:
            yield put
        finally:
            server.stop()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@contextmanager
def templated_front(folder: Path, template: str, core: Tokenizer) -> Generator[Front, None, None]:
    """The same, with a chat template and a tokenizer, which are written into the folder."""
    folder.mkdir(exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    with switching_front(folder) as front:
        yield front


def script_tokens(core: Tokenizer, text: str, size: int = 3, **how: Any) -> ScriptedModel:
    """A model that says the tokens of `text`, some at a time; special ones without text."""
    ids = core.encode(text, add_special_tokens=False).ids
    parts = tuple(tuple(ids[at : at + size]) for at in range(0, len(ids), size))
    pieces = [core.decode(list(part), skip_special_tokens=True) for part in parts]
    return ScriptedModel(pieces=pieces, token_ids=parts, **how)


def openai_client(url: str) -> openai.OpenAI:
    """A client of the front at http://host:port."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def post(url: str, path: str, body: Any) -> tuple[int, bytes, http.client.HTTPMessage]:
    """As `fetch`, of the front at http://host:port."""
    return fetch(urlsplit(url).netloc, path, body)

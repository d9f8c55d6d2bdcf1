"""Answers of an OpenAI-compatible server: what is asked, what is kept, what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.errors import DflashError
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.training.endpoint import AnswerOptions, AnswerServer
from dflash_trt.training.rows import RenderedRow
from dflash_trt.training.training_request import EndpointOptions
from tests.frozen.command_line import run
from tests.training.prompts import TARGET, command, write_prompts

END = 0
OPTIONS = AnswerOptions(answer_tokens=20, max_length=24, temperature=0.5, seed=3)


Answer = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Path below /v1 and body to the reply; one with a "status" is an error."""


def completion(text: object, prompt_tokens: int, reason: str = "length") -> dict[str, Any]:
    """A reply of /completions."""
    return {
        "choices": [{"text": text, "finish_reason": reason}],
        "usage": {"prompt_tokens": prompt_tokens},
    }


@contextmanager
def openai_server(answer: Answer, models: tuple[str, ...] = ("target",)) -> Iterator[str]:
    """Its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({"data": [{"id": name} for name in models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._reply(answer(self.path.removeprefix("/v1"), body))

        def log_message(self, *words: object) -> None:
            pass

        def _reply(self, value: dict[str, Any]) -> None:
            content = json.dumps(value).encode()
            self.send_response(value.get("status", 200))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def tokenizer() -> BundleTokenizer:
    return BundleTokenizer(TARGET)


def rendered(tokenizer: BundleTokenizer, text: str) -> RenderedRow:
    return RenderedRow(
        row_id="0f",
        set_name="all",
        category=None,
        messages=(),
        text=text,
        prompt_ids=tuple(tokenizer.encode(text)),
        answer_ids=None,
    )


def connect(url: str, tokenizer: BundleTokenizer, model: str | None = None) -> AnswerServer:
    options = EndpointOptions(url=url, model=model)
    return AnswerServer(options, OPTIONS, tokenizer, {"thinking": False}, (END,))


def test_a_prompt_is_sent_as_it_is_and_its_answer_tokenised(tokenizer: BundleTokenizer) -> None:
    row, asked = rendered(tokenizer, "shift #2001"), []

    def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
        asked.append((path, body))
        return completion(" in oslo", len(row.prompt_ids), "stop" if len(asked) > 1 else "length")

    said = tokenizer.encode(" in oslo", special=False)
    with openai_server(answer) as url:
        server = connect(f"{url}/v1/", tokenizer)
        assert server.ask(row) == said
        assert server.ask(row, greedy_tokens=4) == [*said, END]
    room = 24 - len(row.prompt_ids)
    common = {"model": "target", "seed": 0x0F ^ 3, "prompt": "shift #2001"}
    assert asked == [
        ("/completions", {**common, "max_tokens": room, "temperature": 0.5}),
        ("/completions", {**common, "max_tokens": 4, "temperature": 0.0}),
    ]


REASONED = {"message": {"reasoning_content": "hm"}, "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("reply", "what"),
    [
        (completion("a", 99), "reads 99 tokens where serving sends "),
        ({"choices": []}, "its reply has no answer or no usage"),
        (completion({"a": 1}, 1), "its reply has no answer or no usage"),
        ({"status": 500, "error": "broken\n"}, "answers 500 to /completions"),
        (completion("", 1) | {"choices": [REASONED]}, "takes the reasoning out of answers"),
    ],
)
def test_a_reply_that_cannot_be_trained_on(
    tokenizer: BundleTokenizer, reply: dict[str, Any], what: str
) -> None:
    with openai_server(lambda path, body: reply) as url:
        server = connect(url, tokenizer)
        with pytest.raises(DflashError, match=what) as caught:
            server.ask(rendered(tokenizer, "hello"))
    assert str(caught.value).isprintable()


def test_a_model_that_has_to_be_named(tokenizer: BundleTokenizer) -> None:
    for models, model, what in (
        (("a", "b"), None, "which of its models is the target"),
        (("a", "b"), "c", "has no 'c'"),
        ((), None, "it lists none"),
    ):
        with (
            openai_server(lambda path, body: {}, models) as url,
            pytest.raises(DflashError, match=what),
        ):
            connect(url, tokenizer, model)


def test_a_server_of_another_model_is_found_out(tmp_path: Path, tokenizer: BundleTokenizer) -> None:
    def stranger(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return completion("zzz qqq xxx", len(tokenizer.encode(body["prompt"])))

    prompts = write_prompts(tmp_path / "prompts.jsonl", 24)
    before = sorted(tmp_path.rglob("*"))
    with openai_server(stranger) as url:
        outcome = run(*command(prompts, tmp_path / "draft", "--answers-from", url))
    outcome.fails(1, url, "serves another model: of its greedy tokens on 4 prompts only")
    assert sorted(tmp_path.rglob("*")) == before

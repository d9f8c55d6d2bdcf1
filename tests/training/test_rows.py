"""Prompts as serving sends them, and a server's answers: what is asked, kept and refused."""

from __future__ import annotations

import json
import shutil
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
from dflash_trt.training.rows import LEAST_ANSWER, PromptRenderer, PromptRow, read_sets, split_rows
from dflash_trt.training.training_request import TrainRequest
from tests.frozen.command_line import run
from tests.training.prompts import TARGET, command, rendered, write_prompts, write_rows

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "<assistant>{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}"
)
END = 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> BundleTokenizer:
    """The demo target's, with a chat template that may think."""
    folder = tmp_path_factory.mktemp("target")
    shutil.copy(TARGET / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return BundleTokenizer(folder)


def rows(folder: Path, *lines: object) -> list[PromptRow]:
    return read_sets([str(write_rows(folder / "rows.jsonl", lines))])[0]


def renderer(tokenizer: BundleTokenizer, **options: object) -> PromptRenderer:
    paths = {"target": "", "output": Path(), "prompts": ()}
    request = TrainRequest(hours=1, **paths, **options)  # type: ignore[arg-type]
    return PromptRenderer(tokenizer, request, {"enable_thinking": True}, (END,), 80)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "<user>hello<assistant>"),
        ({"template_options": {"enable_thinking": False}}, "<user>hello<assistant>quick"),
        ({"system_prompt": "be brief"}, "<system>be brief<user>hello<assistant>"),
        ({"raw": True}, "hello"),
    ],
)
def test_a_prompt_is_what_serving_sends(
    tmp_path: Path, tokenizer: BundleTokenizer, options: dict[str, object], text: str
) -> None:
    rendering = renderer(tokenizer, **options)
    (row,) = rendering.render(rows(tmp_path, {"prompt": "hello"}))
    assert row.text == text
    assert list(row.prompt_ids) == tokenizer.encode(text, special=False)
    assert bool(row.messages) is not ("raw" in options)
    assert (rendering.template_sha256 is None) is ("raw" in options)


def test_an_answer_is_used_when_it_is_said_to_be_the_targets(
    tmp_path: Path, tokenizer: BundleTokenizer
) -> None:
    given = rows(tmp_path, {"prompt": "a", "answer": "b c"}, {"prompt": "d", "answer": [7, 8]})
    rendered = renderer(tokenizer).render(given)
    assert [row.answer_ids for row in rendered] == [None, None]
    rendered = renderer(tokenizer, given_answers=True).render(given)
    said = (*tokenizer.encode("b c", special=False), END)
    assert [row.answer_ids for row in rendered] == [said, (7, 8)]


def test_a_prompt_that_leaves_no_room_is_left_out(
    tmp_path: Path, tokenizer: BundleTokenizer
) -> None:
    frame = len(tokenizer.encode("<user><assistant>", special=False))
    most = 80 - LEAST_ANSWER - frame
    some = rows(tmp_path, {"prompt": "#" * most}, {"prompt": "#" * (most + 40)})
    assert len(renderer(tokenizer).render(some)) == 1


@pytest.mark.parametrize(
    ("options", "line", "what"),
    [
        ({"template_options": {"thinking": True}}, {"prompt": "a"}, "knows no thinking"),
        (
            {"system_prompt": "be brief"},
            {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]},
            "begins with a system prompt of its own",
        ),
        (
            {"raw": True},
            {"messages": [{"role": "user", "content": "y"}]},
            "a conversation needs a chat template",
        ),
    ],
)
def test_what_cannot_be_rendered(
    tmp_path: Path,
    tokenizer: BundleTokenizer,
    options: dict[str, object],
    line: object,
    what: str,
) -> None:
    with pytest.raises(DflashError, match=what) as caught:
        renderer(tokenizer, **options).render(rows(tmp_path, line))
    assert caught.value.exit_code == 2


def test_rows_are_split_by_hash_and_never_twice(tmp_path: Path) -> None:
    given, _ = read_sets([str(write_prompts(tmp_path / "first.jsonl", 500))])
    split = split_rows([*given, *given[:10]], None)
    assert (len(split.held_out), len(split.train), split.repeated) == (25, 475, 10)
    again = split_rows(reversed(given), None)
    assert [row.row_id for row in again.held_out] == [row.row_id for row in split.held_out]
    assert not {row.row_id for row in split.train} & {row.row_id for row in split.held_out}
    own, hashes = read_sets([f"own={write_prompts(tmp_path / 'b.jsonl', 30, first=490)}"])
    assert {row.set_name for row in own} == hashes.keys() == {"own"}
    split = split_rows(given, own)
    assert (len(split.held_out), len(split.train)) == (30, 490)
    assert len(split_rows(own[:8], given[:120]).held_out) == 100


def test_a_conversations_last_answer_is_given(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes"},
    ]
    (row,) = rows(tmp_path, {"messages": messages, "category": "chat"})
    assert [one["role"] for one in row.messages] == ["system", "user"]
    assert (row.answer, row.text) == ("yes", None)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "  "}, "its prompt has no text"),
        ({"prompt": 3}, 'must be an object with a text "prompt"'),
        ({"messages": [{"role": "nobody", "content": "a"}]}, '"messages" of role and content'),
        ({"messages": [{"role": "system", "content": "a"}]}, "its prompt has no text"),
        ({"prompt": "a", "answer": [-1]}, 'its "answer" is neither a text nor token ids'),
        ({"prompt": "a", "answer": []}, 'its "answer" is neither a text nor token ids'),
        ({"prompt": "\ud800"}, "is not Unicode text at character 0"),
    ],
)
def test_a_row_that_asks_nothing(tmp_path: Path, row: object, what: str) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "hello"}, row])
    with pytest.raises(DflashError, match=what) as caught:
        read_sets([str(prompts)])
    assert caught.value.exit_code == 2 and str(caught.value).startswith(f"{prompts}:2")


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


def connect(url: str, tokenizer: BundleTokenizer, model: str | None = None) -> AnswerServer:
    return AnswerServer(url, model, OPTIONS, tokenizer, {"thinking": False}, (END,))


def test_a_prompt_is_sent_as_it_is_and_its_answer_tokenised(tokenizer: BundleTokenizer) -> None:
    row, asked = rendered("shift #2001", tokenizer.encode("shift #2001")), []

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
            server.ask(rendered("hello", tokenizer.encode("hello")))
    assert str(caught.value).isprintable()


def test_a_model_that_has_to_be_named(tokenizer: BundleTokenizer) -> None:
    for models, model, what in (
        (("a", "b"), None, "which of its models is the target"),
        (("a", "b"), "c", "has no 'c'"),
        ((), None, "lists no model"),
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

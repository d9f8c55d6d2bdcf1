"""`generate --chat`, several prompts, stdin and system messages: what is sent and shown."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli.main import main
from tests.cli.bigram import write_bigram_pair
from tests.cli.conftest import Run
from tests.waiting import PATIENCE_S

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{{ 'k' if thinks }}"


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a template: a bigram pair continues the last character of a conversation."""
    config = write_bigram_pair(tmp_path_factory.mktemp("talker"), template=TEMPLATE)
    folder = config.parent / "bundle"
    assert main(["build", "--target", str(config), "-o", str(folder)]) == 0
    return folder


def _type(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_several_prompts_and_stdin(run: Run, talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _type(monkeypatch, "x\n")
    asked = ("generate", talker, "--prompt", "a", "--prompt", "-", "--max-tokens", 4, "--json")
    answers = run.well(*asked).json["requests"]
    assert [one["text"] for one in answers] == ["baba", "yz"]
    run("generate", talker, "--prompt", "-", "--prompt", "-").fails(2, "stdin can be read once")
    _type(monkeypatch, "")
    run("generate", talker, "--prompt", "-").fails(2, "--prompt")


def test_a_system_message_stands_before_each(run: Run, talker: Path, bundle: Path) -> None:
    asked = ("generate", talker, "--prompt", "a", "--prompt", "cc", "--json", "--max-tokens", 1)
    plain = run.well(*asked).json["requests"]
    told = run.well(*asked, "--system", "zzz").json["requests"]
    more = [b["prompt_tokens"] - a["prompt_tokens"] for a, b in zip(plain, told, strict=True)]
    assert more == [4, 4]
    option = ("--template-option", "thinks=true")
    thought = run.well(*asked, *option).json["requests"]
    assert [one["prompt_tokens"] for one in thought] == [one["prompt_tokens"] + 1 for one in plain]
    run(*asked, *option, "--raw").fails(2, "--template-option", "--raw")
    run(*asked, "--template-option", "thinks").fails(2, "is not one NAME=VALUE")
    run(*asked, "--system", "s", "--raw").fails(2, "--system", "--raw")
    run("generate", bundle, "--prompt", "a", "--system", "s").fails(2, "--system", "template")


def test_a_conversation_is_remembered(
    run: Run, talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _type(monkeypatch, "x\n/help\n\nb\n/new\n7\n/quit\n7\n")
    shown = run.well("generate", talker, "--chat", "--max-tokens", 4, "--block-schedule", "none")
    assert shown.out == "yz\nabab\n8901\n"
    lines = [line for line in shown.err.splitlines() if "tokens/s" in line]
    assert len(lines) == 3 and "acceptance length 1.50" in lines[1]
    assert (
        shown.err.startswith("pair, 1 CPU thread\n")
        and shown.err.count("Ctrl-D or /quit the chat") == 2
    )


def test_what_a_chat_is_not(run: Run, talker: Path, bundle: Path) -> None:
    run("generate", talker, "--chat", "--prompt", "a").fails(2, "--prompt", "--chat")
    run("generate", bundle, "--chat").fails(2, "no chat template")
    run("generate", "--chat").fails(2, "no model")
    run("generate", "--chat", "--url", "ftp://a:1").fails(2, "--url", "http://")
    run("generate", "--chat", "--url", "http://127.0.0.1:1").fails(1, "does not answer /models")


class _Server(BaseHTTPRequestHandler):
    """Answers with the number of messages that it was sent, and the last one."""

    bodies: list[dict[str, Any]]
    keys: list[str | None]
    model: Any = "m"
    owner = "another"

    def do_GET(self) -> None:
        self.keys.append(self.headers["Authorization"])
        self._send(json.dumps({"data": [{"id": self.model, "owned_by": self.owner}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        last = body["messages"][-1]["content"]
        if last == "elsewhere":
            self.wfile.write(b"HTTP/1.1 302 x\r\nLocation: /v1/models\r\n\r\n")
            return
        if last == "refuse":
            self.send_error(400, "no")
            return
        deltas = [{"reasoning_content": "hm"}, {"content": f"{len(body['messages'])}"}]
        deltas += [{"content": last}]
        lines = [f"data: {json.dumps({'choices': [{'delta': one}]})}\n\n" for one in deltas]
        lines += [": a comment\n\n", 'data: {"choices": [], "usage": {}}\n\n']
        lines += [f"data: {'[' * 90_000}\n\n"] if last == "nest" else []
        lines += [] if last == "break" else ["data: [DONE]\n\n"]
        self._send("".join(lines).encode())

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server() -> Iterator[tuple[str, type[_Server]]]:
    handler = type("Handler", (_Server,), {"bodies": [], "keys": []})
    served = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{served.server_address[1]}/v1", handler
    served.shutdown()
    thread.join()
    served.server_close()


def test_with_a_served_model(
    run: Run, server: tuple[str, type[_Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = server
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    _type(monkeypatch, "one\nrefuse\ntwo\nbreak\nnest\n")
    options = ("--system", "s", "--temperature", 0.5, "--max-tokens", 7, "--stop", "zz")
    options += ("--template-option", "enable_thinking=false")
    shown = run.well("generate", "--chat", "--url", url, *options)
    assert shown.out.replace("hm\n\n", "").split() == ["2one", "4two", "6break6nest"]
    assert "error: " in shown.err and "answers 400" in shown.err and "broke off" in shown.err
    assert "answers JSON is nested too deeply" in shown.err
    assert handler.keys == ["Bearer secret"]
    second = handler.bodies[2]
    assert (second["model"], second["temperature"], second["max_tokens"]) == ("m", 0.5, 7)
    assert second["stop"] == ["zz"] and second["stream"]
    assert second["chat_template_kwargs"] == {"enable_thinking": False}
    assert [one["role"] for one in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == "2one"
    assert "repetition_penalty" not in second  # a field that others may refuse
    handler.owner = "dflash-trt"
    _type(monkeypatch, "one\n")
    run.well("generate", "--chat", "--url", url, "--top-k", 5)
    neutral = {"temperature": 0, "top_k": 5, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    assert handler.bodies[-1].items() >= neutral.items()


def test_a_key_goes_to_no_other_place(
    run: Run, server: tuple[str, type[_Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = server
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    _type(monkeypatch, "elsewhere\n")
    run("generate", "--chat", "--url", url).fails(1, "answers 302")
    assert len(handler.keys) == 1


def test_in_a_terminal(talker: Path) -> None:
    """Colours and their legend; Ctrl-C ends an answer and not the chat, Ctrl-D ends that."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "dflash_trt", "generate", str(talker), "--chat", "--ignore-eos"]
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    ) as chat:
        os.close(theirs)
        seen = b""

        def read_until(piece: bytes) -> None:
            nonlocal seen
            while piece not in seen:
                seen += os.read(ours, 4096)

        killer = threading.Timer(PATIENCE_S, chat.kill)
        killer.start()
        try:
            read_until(b"> ")
            assert b"\x1b[32maccepted drafts" in seen
            os.write(ours, b"b\n")
            read_until(b"\x1b[32mb\x1b[0m")  # a draft that was accepted
            os.kill(chat.pid, signal.SIGINT)
            read_until(b"ended; ")
            seen = seen.partition(b"ended; ")[2]
            read_until(b"> ")  # what is typed before the prompt is there may be lost
            seen = b""
            os.write(ours, b"/new\n")
            read_until(b"> ")
            os.write(ours, b"\x04")
            assert chat.wait(PATIENCE_S) == 0
        finally:
            killer.cancel()
            chat.kill()
            os.close(ours)

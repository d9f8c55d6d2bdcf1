"""Clients of the OpenAI front that are slow, silent, many or large: others do not notice them."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from dflash_trt.serving.openai import body, large, server, streams
from dflash_trt.serving.openai.reply import ReplyWriter
from tests.cli.bigram import write_tokenizer
from tests.serving.fronts import Front, ScriptedModel, post, switching_front
from tests.serving.served import fetch
from tests.waiting import PATIENCE_S, wait_until

PROMPT: dict[str, Any] = {"model": "demo", "prompt": "count"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
SOON_S = 0.2


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    with switching_front(folder) as front:
        yield front


@contextmanager
def _connected(url: str, *sent: bytes) -> Iterator[socket.socket]:
    """A connection on which these pieces were sent."""
    host, _, port = urlsplit(url).netloc.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
        for piece in sent:
            client.sendall(piece)
        yield client


def _read(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    parts: list[bytes] = []
    try:
        while part := client.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def _works(url: str) -> None:
    assert post(url, "/v1/completions", PROMPT)[0] == 200


def test_a_client_that_says_nothing(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_S", SOON_S)
    monkeypatch.setattr(body, "BODY_S", SOON_S)
    url, late = front(ScriptedModel()), HEAD + b"Content-Length: 5000\r\n\r\n{"
    asked = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    status = b"HTTP/1.1 "
    for sent, answered in (
        ((), b""),
        ((HEAD,), b""),
        ((asked, HEAD), status + b"200"),
        ((late,), status + b"408"),
    ):
        with _connected(url, *sent) as client:  # and never the rest
            assert _read(client)[:12] == answered
    _works(url)


def test_more_idle_connections_than_there_are_places(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest are closed at once; the others go when they have said nothing for so long."""
    monkeypatch.setattr(server, "HEAD_S", SOON_S)
    monkeypatch.setattr(server, "count_connections", lambda: 8)
    url = front(ScriptedModel())
    with ExitStack() as stack:
        for client in [stack.enter_context(_connected(url)) for _ in range(30)]:
            assert _read(client) == b""
        _works(url)


def test_a_client_that_takes_nothing(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STALL_S", SOON_S)
    model = ScriptedModel(pieces=["x" * (1 << 20)] * 64)
    asked = json.dumps(PROMPT | {"stream": True}).encode()
    with _connected(front(model), HEAD + b"Content-Length: %d\r\n\r\n" % len(asked) + asked):
        assert model.wait_finished() == "cancelled"


def test_bodies_have_room_for_so_much(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    url, large = front(ScriptedModel()), PROMPT | {"prompt": "x" * (2 << 20)}
    assert post(url, "/v1/completions", large)[0] == 200
    with monkeypatch.context() as patch:
        patch.setattr(body, "MAX_HELD_BYTES", 1 << 20)
        assert post(url, "/v1/completions", large)[0] == 503
        _works(url)
    assert post(url, "/v1/completions", large)[0] == 200


def test_a_stream_that_waits_has_its_head_and_says_so(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "HEAD_S", 0.001)
    monkeypatch.setattr(streams, "COMMENT_S", 0.001)
    model, asked = ScriptedModel(gate=threading.Event()), PROMPT | {"stream": True}
    sent, heard = json.dumps(asked).encode(), b""
    head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(sent)
    with _connected(front(model), head + sent) as client:
        while heard.count(b": waiting\n\n") < 3:
            heard += client.recv(1 << 16)
        assert heard.startswith(b"HTTP/1.1 200") and b"data:" not in heard
        assert model.gate is not None
        model.gate.set()
        assert b'"text":"one "' in (rest := _read(client)) and b"data: [DONE]\n\n" in rest


@pytest.mark.parametrize("encoder", [large.WHOLE, large.EVENT])
def test_pieces_are_the_json_that_they_were(encoder: json.JSONEncoder) -> None:
    places = [{"token": "é\u2028", "bytes": [one]} for one in range(5000)]
    value = {"a": places, "b": [], "c": {}, "d": [{"e": None}, [places]], "f": "g"}
    written = large.Written(large.write_json(value, encoder))
    assert b"".join(written.pieces).decode() == encoder.encode(value)
    assert len(written.pieces) > 5 and max(map(len, written.pieces)) <= large.PIECE_BYTES
    ready = {**value, "a": large.Written(large.write_json(places, encoder))}
    assert b"".join(large.write_json(ready, encoder)).decode() == encoder.encode(value)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_large_reply_is_written_beside_the_event_loop(
    front: Front, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    began, go_on = threading.Event(), threading.Event()
    name = "piece" if streaming else "choice"
    write = getattr(ReplyWriter, name)

    def held(self: ReplyWriter, *given: Any) -> Any:
        began.set()
        assert go_on.wait(PATIENCE_S)
        return write(self, *given)

    monkeypatch.setattr(ReplyWriter, name, held)
    url = front(ScriptedModel(pieces=["x" * (1 << 20)]))
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(post, url, "/v1/completions", PROMPT | {"stream": streaming})
        try:
            assert began.wait(PATIENCE_S)
            assert fetch(urlsplit(url).netloc, "/health", b"", "GET")[0] == 200
        finally:
            go_on.set()
        status, content, _ = reply.result()
    assert status == 200 and b"x" * (1 << 20) in content


def test_a_large_reply_is_let_go_when_its_client_leaves(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large, "MAX_HELD_BYTES", 24 << 20)
    url, asked = front(ScriptedModel(pieces=["x" * (16 << 20)])), json.dumps(PROMPT).encode()
    with _connected(url, HEAD + b"Content-Length: %d\r\n\r\n" % len(asked) + asked) as client:
        assert client.recv(12) == b"HTTP/1.1 200"
        assert post(url, "/v1/completions", PROMPT)[0] == 503
    wait_until(lambda: post(url, "/v1/completions", PROMPT)[0] == 200)


def test_replies_have_room_for_so_much(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedModel(pieces=["x" * (1 << 20)])
    url, two = front(model), PROMPT | {"n": 2}
    for limit, status, word in (
        ("MAX_REPLY_BYTES", 400, b"larger than 1 MiB; ask for less at a time"),
        ("MAX_HELD_BYTES", 503, b"too many large answers"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(large, limit, 3 << 19)
            assert post(url, "/v1/completions", PROMPT)[0] == 200
            refused = post(url, "/v1/completions", two)
            assert refused[0] == status and word in refused[1]
    assert len(post(url, "/v1/completions", two)[1]) > 2 << 20
    asked, ids = len(model.asked), {"prompt": [[1] * 99_000], "prompt_logprobs": 20, "n": 2}
    refused = post(url, "/v1/completions", PROMPT | ids)
    assert refused[0] == 400 and b"larger than 128 MiB" in refused[1]
    assert len(model.asked) == asked, "before any work is done"

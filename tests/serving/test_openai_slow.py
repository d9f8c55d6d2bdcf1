"""Clients of the OpenAI front that are slow, silent, many or large: others do not notice them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from dflash_trt.serving.openai import body, server
from tests.cli.bigram import write_tokenizer
from tests.serving.fronts import Front, ScriptedModel, post, switching_front
from tests.waiting import PATIENCE_S

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

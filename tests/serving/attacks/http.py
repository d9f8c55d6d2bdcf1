"""Attacks on OpenAI's port, with bytes of our own."""

from __future__ import annotations

import json
import random
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

from tests.serving.attacks.table import AT_ONCE, SOON_S, Ending, Target, attack, connected

_STREAMS = 200
_COMPLETIONS = "/v1/completions"
PROMPT: dict[str, Any] = {"model": "demo", "prompt": "host", "max_tokens": 4}


def _read(client: socket.socket) -> Ending:
    """The status of the answer, read up to its last byte; its errors are OpenAI's."""
    data = bytearray()
    with suppress(ConnectionError):
        while part := client.recv(1 << 16):
            data += part
    head, _, content = bytes(data).partition(b"\r\n\r\n")
    if not head:
        return "closed"
    status = int(head.split()[1])
    if status >= 400:
        error = json.loads(content)["error"]
        assert error["message"] and len(error["message"]) < 600 and "Traceback" not in str(error)
    return status


def _send(address: str, *pieces: bytes, half_close: bool = False) -> Ending:
    with connected(address) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
            if half_close:
                client.shutdown(socket.SHUT_WR)
        except ConnectionError:  # it was refused before it was all there
            pass
        return _read(client)


def _request(body: bytes, *headers: str, path: str = _COMPLETIONS) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    if not any(line.lower().startswith(("content-length", "transfer")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


def ask_json(target: Target, body: Any, path: str = _COMPLETIONS) -> Ending:
    """How a request with this body ends; bytes go as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _send(target.front, _request(data, path=path))


@attack(400, "closed")
def noise(target: Target, random: random.Random) -> set[Ending]:
    return {
        _send(target.front, random.randbytes(random.randint(1, 4000)) + b"\r\n\r\n")
        for _ in range(8)
    }


@attack(200, 400, 404, 413)
def bodies_with_wrong_bytes(target: Target, random: random.Random) -> set[Ending]:
    endings: set[Ending] = set()
    for _ in range(24):
        body = bytearray(json.dumps(PROMPT).encode())
        for _ in range(random.randint(1, 6)):
            body[random.randrange(len(body))] = random.randrange(256)
        endings.add(ask_json(target, bytes(body)))
    return endings


@attack(400)
def values_of_the_wrong_kind(target: Target, random: random.Random) -> set[Ending]:
    odd = (None, -1, 1e308, "", [], {}, [[]], "\ud800", 2**70, True, "x" * 5000, [None] * 9)
    names = ("model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "stream")
    endings = {
        ask_json(target, PROMPT | {name: random.choice(odd[4:7]), "stream_options": 3})
        for name in names
    }
    return endings | {ask_json(target, one) for one in odd}


@attack(400, 413, "closed")
def lengths_that_lie(target: Target, random: random.Random) -> set[Ending]:
    lengths = ("-1", "1e3", "0x10", "5, 6", "", str(10**30), str(random.randint(2**31, 2**63)))
    return {_send(target.front, _request(b"{}", f"Content-Length: {one}")) for one in lengths}


@attack(400, 413)
def chunks_that_lie(target: Target, random: random.Random) -> set[Ending]:
    chunked = "Transfer-Encoding: chunked"
    return {
        _send(target.front, _request(body, chunked))
        for body in (
            b"zz\r\n\r\n",
            b"-5\r\nhello\r\n",
            b"5\r\nhello0\r\n\r\n",
            b"1\r\n[\r\n" * 50_000 + b"0\r\n\r\n",
            b"F" * 40 + b"\r\n",
        )
    }


@attack(400, 404, 405, "closed")
def heads_too_large(target: Target, random: random.Random) -> set[Ending]:
    many = "\r\n".join(f"X-{number}: y" for number in range(20_000))
    return {
        _send(target.front, _request(b"{}", "X-A: " + "a" * 500_000)),
        _send(target.front, _request(b"{}", many)),
        _send(target.front, f"GET /{'a' * 200_000} HTTP/1.1\r\nHost: x\r\n\r\n".encode()),
        _send(target.front, _request(b"{}", path="/v1/../../etc/passwd")),
        _send(target.front, _request(b"{}", path="/v1/models")),
    }


@attack(413, slow=True)
def bodies_too_large(target: Target, random: random.Random) -> set[Ending]:
    return {ask_json(target, PROMPT | {"prompt": "x" * (17 << 20)})}


@attack(400, slow=True)
def prompts_too_long(target: Target, random: random.Random) -> set[Ending]:
    return {ask_json(target, PROMPT | {"prompt": "host " * (3 << 20)})}


@attack(400, slow=True)
def too_many_values(target: Target, random: random.Random) -> set[Ending]:
    return {
        ask_json(target, b"[" + b"[]," * (5 << 20) + b"0]"),
        ask_json(target, b"[" + b'{"a":1},' * (1 << 20) + b"0]"),
        ask_json(target, b"[" + b'"a",' * (3 << 20) + b"0]"),
        ask_json(target, {"model": "demo", "messages": [{"role": "user", "content": ""}] * 60_000}),
    }


@attack(400)
def nested(target: Target, random: random.Random) -> set[Ending]:
    deep = random.randint(30_000, 90_000)
    inside = b'{"model":"demo","prompt":' + b"[" * deep + b"]" * deep + b"}"
    return {
        ask_json(target, b"[" * 500_000 + b"]" * 500_000),
        ask_json(target, b'{"a":' * deep + b"1" + b"}" * deep),
        ask_json(target, inside),
    }


@attack("closed", 200, 400)
def half_closed(target: Target, random: random.Random) -> set[Ending]:
    """A client that closes its side has gone, as far as anybody can tell."""
    whole = _request(json.dumps(PROMPT).encode())
    cut = random.randrange(1, len(whole))
    return {_send(target.front, piece, half_close=True) for piece in (whole, whole[:cut], b"")}


@attack(200)
def many_idle(target: Target, random: random.Random) -> set[Ending]:
    """Nobody waits for connections that say nothing, on either port."""
    with ExitStack() as stack:
        for address in (target.front, target.grpc):
            for _ in range(300):
                stack.enter_context(connected(address))
        return {ask_json(target, PROMPT)}


@attack("closed", 408, slow=True)
def idle_and_slow(target: Target, random: random.Random) -> set[Ending]:
    """No byte, half a head, half a body, and drops of both."""
    half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Len"
    body = _request(b"{", "Content-Length: 5000")

    def drip(start: bytes) -> Ending:
        with connected(target.front) as client:
            client.settimeout(random.uniform(0.2, 0.8))
            with suppress(ConnectionError):
                client.sendall(start)
                for _ in range(int(2 * SOON_S / 0.2)):
                    with suppress(TimeoutError):
                        return _read(client)
                    client.sendall(b"x")
            return "closed"

    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(_send, target.front, start) for start in (b"", half, body)]
        waiting += [pool.submit(drip, start) for start in (half, body)]
        return {one.result() for one in waiting}


@attack("closed", slow=True)
def aborted_streams(target: Target, random: random.Random) -> set[Ending]:
    """Clients that go away in all ways: before, at and after the first byte of the answer."""
    asked = PROMPT | {"stream": True, "max_tokens": 400, "ignore_eos": True}
    request = _request(json.dumps(asked).encode())

    def leave(how: int) -> Ending:
        with connected(target.front) as client:
            client.sendall(request)
            if how % 3:
                client.recv(how)
            if how % 2:  # a reset, not a goodbye
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "closed"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return set(pool.map(leave, [random.randint(1, 200) for _ in range(_STREAMS)]))

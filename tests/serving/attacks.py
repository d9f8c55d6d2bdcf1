"""Attacks on a served pair: each has one clear ending, and soon.

`python -m tests.serving.attacks URL HOST:PORT` runs all on a pair that somebody serves.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.serving.client import CLASSIC, LLM, StreamClient, ask_grpc, make_fields, make_inputs

SOON_S = 20.0
_PATIENCE_S = 60.0
_STREAMS, _AT_ONCE = 200, 64
_PROMPT: dict[str, Any] = {"model": "demo", "prompt": "host", "max_tokens": 4}
Ending = int | str
"""A status of HTTP, "closed" without one, or how gRPC ended: "refused", "answered"."""


@dataclass(frozen=True)
class Target:
    """Where a pair is served, host:port of OpenAI's API and of gRPC, and the attack's chances."""

    front: str
    grpc: str
    random: random.Random

    def send(self, data: bytes, *, half_close: bool = False) -> Ending:
        """The status of the front's answer, read up to its last byte."""
        with connected(self.front) as client:
            with suppress(ConnectionError):  # it was refused before it was all there
                client.sendall(data)
                if half_close:
                    client.shutdown(socket.SHUT_WR)
            return _read(client)

    def post(self, body: Any) -> Ending:
        """How a request with this body ends; bytes go as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send(_request(data))

    def ask(self, model: str, fields: Any, **parameters: Any) -> Ending:
        """How a request over gRPC ends."""
        answer = ask_grpc(self.grpc, model, fields, parameters=parameters)
        if answer.error is None:
            return "answered"
        said = answer.failure
        assert len(said) < 600 and "Traceback" not in said and "Error(" not in said, said
        return "refused"


Run = Callable[[Target], set[Ending]]


@dataclass(frozen=True)
class Attack:
    """`run` returns how it ended, which must be among `endings`; a `slow` one takes a while."""

    run: Run
    endings: frozenset[Ending]
    slow: bool

    def check(self, openai: str, grpc: str, seed: int) -> str | None:
        """What was wrong with its ending; None: nothing."""
        name, started = f"{self.run.__name__} ({seed})", time.monotonic()
        endings = self.run(Target(urlsplit(openai).netloc, grpc, random.Random(name)))
        took = time.monotonic() - started
        if not endings <= self.endings:
            return f"{name}: {endings - self.endings}, not {set(self.endings)}"
        return f"{name}: took {took:.1f} s" if took > SOON_S else None


ATTACKS: list[Attack] = []


def attack(*endings: Ending, slow: bool = False) -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        ATTACKS.append(Attack(run, frozenset(endings), slow))
        return run

    return add


@contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_PATIENCE_S) as client:
        yield client


def _read(client: socket.socket) -> Ending:
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


def _request(body: bytes, *headers: str, path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    if not any(line.lower().startswith(("content-length", "transfer")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


@attack(400, "closed")
def noise(target: Target) -> set[Ending]:
    chance = target.random
    return {target.send(chance.randbytes(chance.randint(1, 4000)) + b"\r\n\r\n") for _ in range(8)}


@attack(200, 400, 404, 413)
def bodies_with_wrong_bytes(target: Target) -> set[Ending]:
    chance, endings = target.random, set[Ending]()
    for _ in range(24):
        body = bytearray(json.dumps(_PROMPT).encode())
        for _ in range(chance.randint(1, 6)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        endings.add(target.post(bytes(body)))
    return endings


@attack(400, 413, "closed")
def lengths_that_lie(target: Target) -> set[Ending]:
    large = str(target.random.randint(2**31, 2**63))
    lengths = ("-1", "1e3", "0x10", "5, 6", "", str(10**30), large)
    return {target.send(_request(b"{}", f"Content-Length: {one}")) for one in lengths}


@attack(400, 413)
def chunks_that_lie(target: Target) -> set[Ending]:
    bodies = [b"zz\r\n\r\n", b"-5\r\nhello\r\n", b"5\r\nhello0\r\n\r\n", b"F" * 40 + b"\r\n"]
    bodies.append(b"1\r\n[\r\n" * 50_000 + b"0\r\n\r\n")
    return {target.send(_request(body, "Transfer-Encoding: chunked")) for body in bodies}


@attack(400, 404, 405, "closed")
def heads_too_large(target: Target) -> set[Ending]:
    many = "\r\n".join(f"X-{number}: y" for number in range(20_000))
    return {
        target.send(_request(b"{}", "X-A: " + "a" * 500_000)),
        target.send(_request(b"{}", many)),
        target.send(f"GET /{'a' * 200_000} HTTP/1.1\r\nHost: x\r\n\r\n".encode()),
        target.send(_request(b"{}", path="/v1/../../etc/passwd")),
    }


@attack(400, 413, slow=True)
def bodies_too_large(target: Target) -> set[Ending]:
    return {
        target.post(_PROMPT | {"prompt": "x" * (17 << 20)}),
        target.post(_PROMPT | {"prompt": "host " * (3 << 20)}),
        target.post(b"[" + b"[]," * (5 << 20) + b"0]"),
        target.post(b"[" + b'{"a":1},' * (1 << 20) + b"0]"),
    }


@attack(400)
def nested(target: Target) -> set[Ending]:
    deep = target.random.randint(30_000, 90_000)
    return {
        target.post(b"[" * 500_000 + b"]" * 500_000),
        target.post(b'{"a":' * deep + b"1" + b"}" * deep),
        target.post(b'{"model":"demo","prompt":' + b"[" * deep + b"]" * deep + b"}"),
    }


@attack("closed", 200, 400)
def half_closed(target: Target) -> set[Ending]:
    """A client that closes its side has gone, as far as anybody can tell."""
    whole = _request(json.dumps(_PROMPT).encode())
    cut = target.random.randrange(1, len(whole))
    return {target.send(piece, half_close=True) for piece in (whole, whole[:cut], b"")}


@attack(200)
def many_idle(target: Target) -> set[Ending]:
    """Nobody waits for connections that say nothing, on either port."""
    with ExitStack() as stack:
        for address in (target.front, target.grpc):
            for _ in range(300):
                stack.enter_context(connected(address))
        return {target.post(_PROMPT)}


@attack("closed", slow=True)
def aborted_streams(target: Target) -> set[Ending]:
    """Clients that go away in all ways: before, at and after the first byte of the answer."""
    asked = _PROMPT | {"stream": True, "max_tokens": 400, "ignore_eos": True}
    request = _request(json.dumps(asked).encode())
    fields = make_fields(LLM, "host", max_tokens=400, stream=True)

    def leave(how: int) -> Ending:
        if how % 4 == 0:
            client = StreamClient(target.grpc)
            client.send(LLM, fields, parameters={"ignore_eos": True})
            with suppress(InferenceServerException):  # the queue is full
                if how % 8:
                    next(client.receive(), None)
            client.close(cancel=True)
            return "closed"
        with connected(target.front) as front:
            front.sendall(request)
            if how % 3:
                front.recv(how)
            if how % 2:  # a reset, not a goodbye
                front.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "closed"

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return set(pool.map(leave, range(1, _STREAMS)))


@attack("refused", slow=True)
def inputs_too_large(target: Target) -> set[Ending]:
    many, llm, classic = ["zq"] * 100_000, make_fields(LLM, "x"), make_fields(CLASSIC, "x")
    return {
        target.ask(LLM, llm | {"sampling_param_stop": many}),
        target.ask(CLASSIC, classic | {"stop_words": many}),
        target.ask(CLASSIC, classic | {"bad_words": [""] * 100_000}),
        target.ask(LLM, llm | {"sampling_param_stop": "x" * (8 << 20)}),
        target.ask(LLM, make_fields(LLM, "x" * (48 << 20))),
        target.ask(LLM, llm | {"text_input": ["a"] * 50_000}),
        target.ask(CLASSIC, make_fields(CLASSIC, "x" * (8 << 20))),
    }


@attack("refused")
def parameters_nobody_knows(target: Target) -> set[Ending]:
    many = {f"p{number}": number for number in range(5_000)}
    odd = ({"block_size": 2**40}, {"end_id": 2**40}, {"timeout_us": -5})
    fields = make_fields(LLM, "host", max_tokens=2)
    return {target.ask(LLM, fields, **one) for one in (many, {"x" * 100_000: "y" * 100_000}, *odd)}


@attack("refused")
def texts_that_are_not_there(target: Target) -> set[Ending]:
    """Tensors said to lie in shared memory that nobody registered, or longer than they are."""
    tensor = grpcclient.InferInput("text_input", [1], "BYTES")
    tensor.set_shared_memory(target.random.choice(("x", "", "../x")), 64, 2**40)
    endings = {target.ask(LLM, [tensor])}
    tensor = grpcclient.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"host"], dtype=np.object_))
    for length in (2**31 - 1, 2**32 - 1, 5, target.random.randint(6, 2**31)):
        tensor._raw_content = struct.pack("<I", length) + b"host"
        endings.add(target.ask(LLM, [tensor]))
    return endings


@attack("refused")
def tensors_of_no_number(target: Target) -> set[Ending]:
    endings: set[Ending] = set()
    for model, prefix in ((LLM, "sampling_param_"), (CLASSIC, "")):
        inputs = make_inputs(model, make_fields(model, "host", max_tokens=2))
        for kind in ("frequency_penalty", "presence_penalty", "temperature", "top_p"):
            for value in (np.nan, np.inf, -np.inf, -3e38):
                tensor = grpcclient.InferInput(f"{prefix}{kind}", [1], "FP32")
                tensor.set_data_from_numpy(np.array([value], np.float32))
                endings.add(target.ask(model, [*inputs, tensor]))
    return endings


_DEEP: dict[str, Any] = {"type": "string"}
for _ in range(90):
    _DEEP = {"type": "object", "properties": {"a": _DEEP}, "required": ["a"]}
_PATTERNS = ("(", "(" * 2000 + ")" * 2000, "a" * 70_000, "(?<n")
_SCHEMAS: tuple[Any, ...] = (
    *({"type": "nothing"}, {"$ref": "#/nowhere"}, {"$ref": "http://127.0.0.1:9/x"}),
    *({"type": "string", "pattern": one} for one in _PATTERNS),
    {"type": "string", "minLength": 10**30},
    {"type": "array", "minItems": 9, "maxItems": 3, "items": {"type": "integer"}},
    *({"enum": []}, {"enum": ["x" * 50] * 5_000}),
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    *(_DEEP, "x", None),
)


@attack("refused")
def grammars_of_nothing(target: Target) -> set[Ending]:
    asked = [{"kind": "json_schema", "text": json.dumps(one)} for one in _SCHEMAS]
    asked += [{"kind": "regex", "text": one} for one in _PATTERNS]
    fields = make_fields(LLM, "host", max_tokens=2)
    return {target.ask(LLM, fields, grammar=json.dumps(one)) for one in asked}


@attack("refused")
def parameters_that_lie(target: Target) -> set[Ending]:
    """What our own clients send to the model beside its inputs."""
    texts = ("", "[", "[" * 60_000, "{}", "3", "nan", "\0", '"x"', "9" * 5000, "null", 3, True)
    ids = ("[1, -1]", f"[{2**40}]", f"[{10**30}]", "[1.0]", "[true]", "[[1]]")
    biases = ('{"1": "x"}', '{"1": NaN}', '{"99999999": 1}', '{"1": 1e99}')
    biases += (f'{{"{"9" * 5000}": 1}}',)
    kinds = ('{"kind": [], "text": ""}', '{"kind": "regex", "text": "("}', '{"kind": "x"}')
    odd: dict[str, tuple[Any, ...]] = {
        "logit_bias": (*(one for one in texts if one != "{}"), *biases),
        "prompt_ids": (*texts, *ids, "[]"),
        "grammar": (*texts, *kinds),
        "repetition_penalty": ("", "nan", "inf", "1e308", "-1", "0", "x", "9" * 5000, 3, True),
        "logprobs": (-1, 2**40, "3", True),
        "prompt_logprobs": (-1, 2**40, "3", True),
    }
    fields = make_fields(LLM, "host", max_tokens=2)
    pairs = [(name, value) for name, values in odd.items() for value in values]
    return {target.ask(LLM, fields, **{name: value}) for name, value in pairs}


@attack("closed")
def no_grpc(target: Target) -> set[Ending]:
    """Other protocols on gRPC's port."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    frames = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\xff\xff\xff\x01\x05" * 50
    for data in (_request(b"{}"), target.random.randbytes(2000), preface + frames):
        with connected(target.grpc) as client, suppress(ConnectionError):
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                pass
    return {"closed"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("openai", help="URL, http://host:port/v1; its model is named demo")
    parser.add_argument("grpc", help="host:port")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = 0
    for one in ATTACKS:
        started = time.monotonic()
        wrong = one.check(options.openai, options.grpc, options.seed)
        failed += wrong is not None
        print(f"{time.monotonic() - started:6.2f} s  {wrong or one.run.__name__}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())

"""A served pair under attack: every attack ends clearly and soon, and the next answer is right."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.serving.conftest import Generate
from tests.serving.fronts import post
from tests.serving.served import CLASSIC, LLM, PROMPTS, Served, ask_grpc, make_fields, make_inputs
from tests.waiting import PATIENCE_S

PROMPT: dict[str, Any] = {"model": "demo", "prompt": "host", "max_tokens": 4}
BODY = json.dumps(PROMPT).encode()


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def send(front: str, data: bytes) -> int:
    """The status of the answer; 0 where the connection is closed without one."""
    answer = bytearray()
    with connect(front) as client, suppress(ConnectionError):
        with suppress(ConnectionError):  # it was refused before it was all there
            client.sendall(data)
        while part := client.recv(1 << 16):
            answer += part
    assert b"Traceback" not in answer
    return int(answer.split()[1]) if answer else 0


def request(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    if not any(line.lower().startswith(("content-length", "transfer")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, *headers, "Connection: close", "", ""]).encode() + body


HTTP = {
    "noise": b"\x16\x03\x01\x02\0" * 300 + b"\r\n\r\n",
    "wrong bytes": request(BODY.replace(b"host", b"\xffo\0t")),
    "negative": request(b"{}", "Content-Length: -1"),
    "endless": request(b"{}", f"Content-Length: {10**30}"),
    "chunks": request(b"zz\r\n\r\n", "Transfer-Encoding: chunked"),
    "more chunks": request(b"F" * 40 + b"\r\n", "Transfer-Encoding: chunked"),
    "header": request(b"{}", "X-A: " + "a" * 500_000),
    "path": f"GET /{'a' * 200_000} HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
    "nested": request(b"[" * 500_000),
    "cut": request(BODY)[:-9] + b"\r\n" * 9,
}

LLM_FIELDS = make_fields(LLM, "host", max_tokens=2)
PATTERNS = ("(", "(" * 2000 + ")" * 2000, "a" * 70_000, "(?<n")
SCHEMAS = (
    *({"type": "nothing"}, {"$ref": "http://127.0.0.1:9/x"}, {"enum": []}),
    *({"type": "string", "minLength": 10**30}, "x", None),
)
GRAMMARS = [{"kind": "json_schema", "text": json.dumps(one)} for one in SCHEMAS]
GRAMMARS += [{"kind": "regex", "text": one} for one in PATTERNS]
PARAMETERS: list[dict[str, Any]] = [
    *({"grammar": json.dumps(one)} for one in GRAMMARS),
    *({"logit_bias": one} for one in ("[" * 60_000, '{"1": NaN}', '{"99999999": 1}', 3)),
    *({"prompt_ids": one} for one in ("[1, -1]", f"[{10**30}]", "[1.0]", "[true]", "\0")),
    *({"allowed_token_ids": one} for one in ("[]", "nan", "[[1]]")),
    *({"min_p": one} for one in ("nan", "x", 1)),
    *({"block_size": 2**40}, {"end_id": 2**40}, {"timeout_us": -5}),
    *({f"p{number}": number for number in range(5_000)}, {"x" * 100_000: "y" * 100_000}),
]


def _far() -> Any:
    """A tensor in shared memory that nobody registered."""
    tensor = grpcclient.InferInput("text_input", [1], "BYTES")
    tensor.set_shared_memory("../x", 64, 2**40)
    return [tensor]


def _long() -> Any:
    """A text that is said to be longer than it is."""
    tensor = grpcclient.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"host"], dtype=np.object_))
    tensor._raw_content = struct.pack("<I", 2**31 - 1) + b"host"
    return [tensor]


def _no_number(model: str) -> Any:
    tensor = grpcclient.InferInput({LLM: "sampling_param_"}.get(model, "") + "top_p", [1], "FP32")
    tensor.set_data_from_numpy(np.array([np.nan], np.float32))
    return [*make_inputs(model, make_fields(model, "host", max_tokens=2)), tensor]


TENSORS: list[tuple[str, Callable[[], Any]]] = [
    (LLM, _far),
    (LLM, _long),
    (LLM, lambda: _no_number(LLM)),
    (LLM, lambda: LLM_FIELDS | {"sampling_param_stop": ["zq"] * 100_000}),
    (LLM, lambda: LLM_FIELDS | {"text_input": "x" * (8 << 20)}),
]


@pytest.fixture(scope="module")
def right(generate: Generate) -> str | None:
    return generate(PROMPTS[0], max_tokens=12).text


def _still_right(served: Served, right: str | None) -> bool:
    asked = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
    status, answer, _ = post(served.openai.removesuffix("/v1"), "/v1/completions", asked)
    return status == 200 and json.loads(answer)["choices"][0]["text"] == right


def test_over_http(served: Served, right: str | None) -> None:
    front = urlsplit(served.openai).netloc
    for name, sent in HTTP.items():
        ending = send(front, sent)
        assert ending in (0, 400, 404, 413, 431), (name, ending)
    assert _still_right(served, right)
    with ExitStack() as stack:  # nobody waits for connections that say nothing, on either port
        for address in (front, served.address) * 300:
            stack.enter_context(connect(address))
        assert _still_right(served, right)


def test_over_grpc(served: Served, right: str | None) -> None:
    asked = [(LLM, LLM_FIELDS, one) for one in PARAMETERS]
    asked += [
        (model, make(), {}) for model, make in [*TENSORS, (CLASSIC, lambda: _no_number(CLASSIC))]
    ]
    for model, fields, parameters in asked:
        said = ask_grpc(served.address, model, fields, parameters=parameters).failure
        assert len(said) < 600 and "Traceback" not in said and "Error(" not in said, said
    assert _still_right(served, right)

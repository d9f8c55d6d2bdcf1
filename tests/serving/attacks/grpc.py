"""Attacks on the port of gRPC."""

from __future__ import annotations

import random
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.serving.attacks.table import AT_ONCE, Ending, Target, attack, connected
from tests.serving.client import CLASSIC, LLM, ask_grpc, make_fields, make_inputs


def ask(target: Target, model: str, fields: Any, **options: Any) -> Ending:
    """How a request with these fields ends."""
    answer = ask_grpc(target.grpc, model, fields, **options)
    if answer.error is None:
        return "answered"
    said = answer.failure
    assert len(said) < 600 and "Traceback" not in said and "Error(" not in said, said
    return "refused"


@attack("refused", slow=True)
def many_stop_strings(target: Target, random: random.Random) -> set[Ending]:
    stops = [f"zq{random.random()}" for _ in range(100_000)]
    return {
        ask(target, LLM, make_fields(LLM, "host") | {"sampling_param_stop": stops}),
        ask(target, CLASSIC, make_fields(CLASSIC, "host") | {"stop_words": stops}),
        ask(target, CLASSIC, make_fields(CLASSIC, "host") | {"bad_words": [""] * 100_000}),
        ask(target, LLM, make_fields(LLM, "host") | {"sampling_param_stop": "x" * (8 << 20)}),
    }


@attack("refused", slow=True)
def texts_too_large(target: Target, random: random.Random) -> set[Ending]:
    return {
        ask(target, LLM, make_fields(LLM, "x" * (48 << 20))),
        ask(target, LLM, make_fields(LLM, "host") | {"text_input": ["a"] * 50_000}),
        ask(target, CLASSIC, make_fields(CLASSIC, "x" * (8 << 20))),
    }


@attack("refused")
def parameters_nobody_knows(target: Target, random: random.Random) -> set[Ending]:
    many = {f"p{number}": number for number in range(5_000)}
    long = {"x" * 100_000: "y" * 100_000}
    fields = make_fields(LLM, "host", max_tokens=2)
    odd = ({"block_size": 2**40}, {"end_id": 2**40}, {"timeout_us": -5})
    return {ask(target, LLM, fields, parameters=one) for one in (many, long, *odd)}


@attack("refused")
def memory_of_others(target: Target, random: random.Random) -> set[Ending]:
    """Tensors said to lie in shared memory that nobody could register."""
    tensor = grpcclient.InferInput("text_input", [1], "BYTES")
    tensor.set_shared_memory(random.choice(("x", "", "../x")), 64, random.choice((0, 2**40)))
    endings = {ask(target, LLM, [tensor])}
    with grpcclient.InferenceServerClient(target.grpc) as client:
        try:
            client.register_system_shared_memory("x", "/x", 64)
            return endings | {"answered"}
        except InferenceServerException:
            return endings


@attack("refused")
def lengths_inside_texts(target: Target, random: random.Random) -> set[Ending]:
    tensor = grpcclient.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"host"], dtype=np.object_))
    lengths = (2**31 - 1, 2**32 - 1, 5, random.randint(6, 2**31))
    endings: set[Ending] = set()
    for length in lengths:
        tensor._raw_content = struct.pack("<I", length) + b"host"
        endings.add(ask(target, LLM, [tensor]))
    return endings


@attack("closed")
def no_grpc(target: Target, random: random.Random) -> set[Ending]:
    """Other protocols on gRPC's port."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for noise in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        random.randbytes(2000),
        preface + random.randbytes(2000),
        preface + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\xff\xff\xff\x01\x05" * 50,
    ):
        with connected(target.grpc) as client, suppress(ConnectionError):
            client.sendall(noise)
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                pass
    return {"closed"}


@attack("closed", slow=True)
def streams_that_are_left(target: Target, random: random.Random) -> set[Ending]:
    """Streams of gRPC that end with their connection, in the middle of an answer."""
    fields = make_fields(LLM, "host", max_tokens=400, stream=True)

    def leave(number: int) -> Ending:
        client = grpcclient.InferenceServerClient(target.grpc)
        first: list[Any] = []
        client.start_stream(lambda result, error: first.append((result, error)))
        client.async_stream_infer(LLM, make_inputs(LLM, fields), parameters={"ignore_eos": True})
        time.sleep(random.choice((0, 0.01, 0.05)))
        client.stop_stream(cancel_requests=True)
        client.close()
        return "closed"

    with ThreadPoolExecutor(16) as pool:
        return set(pool.map(leave, range(AT_ONCE)))

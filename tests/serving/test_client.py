"""The gRPC client: pieces of text, outputs, errors, and a real server's answers through it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2

from dflash_trt.decoding import SamplingParams
from dflash_trt.serving.client.client import (
    GenerationRequest,
    ServedModel,
    TextDelta,
)
from dflash_trt.serving.client.errors import ServedModelError, read_error
from dflash_trt.serving.client.wire import Response
from tests.cli.conftest import Run
from tests.serving.served import PROMPTS, QUEUE, SLOTS, Served


def _answer(address: str, request: GenerationRequest) -> TextDelta:
    """The one answer to a request that does not stream."""

    async def ask() -> TextDelta:
        model = ServedModel(address)
        try:
            async with aclosing(model.stream(request)) as deltas:
                (delta,) = [one async for one in deltas]
        finally:
            await model.close()
        return delta

    return asyncio.run(ask())


def test_a_limit_beyond_any_context(served: Served) -> None:
    sampling = SamplingParams(temperature=0.5, top_k=2**40)
    request = GenerationRequest(prompt=PROMPTS[0], stop_strings=("a",), streaming=False)
    for one in (request, replace(request, max_tokens=2**40, sampling=sampling)):
        result = _answer(served.grpc, one).result
        assert result is not None and result.finish_reason == "stop"


def test_nobody_there() -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        with pytest.raises(ServedModelError, match="no server answers") as caught:
            _answer(address, GenerationRequest(prompt="x"))
    assert caught.value.problem == "unavailable" and caught.value.unreachable
    assert address in caught.value.message and caught.value.fix


def _respond(**outputs: tuple[str, bytes]) -> Response:
    message = service_pb2.ModelInferResponse()
    for name, (datatype, content) in outputs.items():
        message.outputs.add(name=name, datatype=datatype)
        message.raw_output_contents.append(content)
    return Response(message)


def test_outputs_that_lie() -> None:
    """A server may be anybody's: each is an error of that request, and no traceback."""
    response = _respond(
        long=("BYTES", b"\xff\xff\xff\x7fabc"),
        short=("BYTES", b"\1"),
        word=("BYTES", b"\3\0\0\0abc"),
        odd=("INT64", b"123"),
        float=("FP32", b"1234"),
        unknown=("INT7", b"1234"),
        digits=("BYTES", b"\x88\x13\0\0" + b"9" * 5000),
    )
    empty = service_pb2.ModelInferResponse()
    empty.outputs.add(name="text_output", datatype="BYTES")
    lies: list[Callable[[], object]] = [lambda: Response(empty)]
    lies += [partial(response.texts, name) for name in ("long", "short")]
    lies += [partial(response.numbers, one) for one in ("long", "word", "odd", "float", "unknown")]
    for lie in (*lies, partial(response.numbers, "digits")):
        with pytest.raises(ServedModelError, match="no answer of such a model"):
            lie()


def test_whose_fault_an_error_is() -> None:
    """By its code, whatever its text says."""
    for told, problem in (
        (("INVALID_ARG", "refused", "the prompt is empty"), "refused"),
        (("UNAVAILABLE", "overflow", "the queue is full"), "unavailable"),
        (("UNAVAILABLE", "timed_out", "the deadline has passed"), "overdue"),
        (("CANCELLED", "cancelled", ""), "cancelled"),
        (("INTERNAL", "failed", "the queue is full"), "failed"),
        (("what?",), "failed"),
    ):
        error = read_error([one.encode() for one in told], "host:1")
        assert (error.problem, error.unreachable, error.where) == (problem, False, "host:1")
        assert error.what


# Times differ.
SECONDS = re.compile(r"\d+\.\d+ s\b")


def test_generate_prints_the_same(run: Run, served: Served) -> None:
    """Top-p 1e-50 is 0 in FP32, which would keep all."""
    options = ["--regex", "[a-z]{3,9} #[0-9]{4}", "--temperature", 1, "--top-p", 1e-50]
    common = ["--prompt", PROMPTS[2], "--raw", "--max-tokens", 24, *options]
    local, remote = (run("generate", *one, *common) for one in _sources(served))
    assert (remote.code, remote.out) == (0, local.out)
    here, there = (SECONDS.sub("s", one.err).splitlines() for one in (local, remote))
    assert there[:2] == here[:2] and len(there) == len(here)


def test_many_prompts(run: Run, served: Served, tmp_path: Path) -> None:
    """More than the server holds: the client keeps the rest back."""
    file = tmp_path / "many.jsonl"
    texts = [PROMPTS[number % len(PROMPTS)] for number in range(SLOTS + QUEUE + 4)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    common = ["--prompt-file", file, "--raw", "--max-tokens", 6]
    here, there = (run("generate", *one, *common) for one in _sources(served))
    assert there.code == 0 and there.out == here.out


def _sources(served: Served) -> tuple[tuple[object, ...], ...]:
    """The bundle with blocks that no clock changes, as it is served, and the server."""
    return (served.bundle, "--block-schedule", "none"), (f"--url={served.grpc}",)

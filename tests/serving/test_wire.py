"""The wire client: what it reads from a message, and what it makes of errors."""

from __future__ import annotations

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from dflash_trt.errors import DflashError
from dflash_trt.serving.client.errors import explain, guess_status
from dflash_trt.serving.client.wire import Response, make_input


def _respond(**outputs: tuple[str, bytes]) -> Response:
    message = service_pb2.ModelInferResponse()
    for name, (datatype, content) in outputs.items():
        message.outputs.add(name=name, datatype=datatype)
        message.raw_output_contents.append(content)
    return Response(message)


def test_outputs_by_type() -> None:
    texts = make_input("x", "BYTES", ["", "é", b"12"])._get_content()
    assert texts is not None
    response = _respond(
        texts=("BYTES", texts),
        ids=("INT32", np.array([3, -1], "<i4").tobytes()),
        time_ns=("INT64", np.array([2**40], "<i8").tobytes()),
        figure=("BYTES", b"\x02\0\0\0" + b"12"),
        nothing=("BYTES", b""),
    )
    assert response.texts("texts") == [b"", "é".encode(), b"12"]
    assert response.text("figure") == b"12" and response.text("texts") == b""
    assert response.numbers("ids") == (3, -1)
    assert response.numbers("time_ns") == (2**40,)
    assert response.numbers("figure") == (12,)
    assert response.texts("nothing") == response.texts("absent") == []
    assert response.text("absent") == b"" and response.numbers("absent") == ()


@pytest.mark.parametrize(
    ("status", "message", "problem", "unreachable"),
    [
        ("StatusCode.INVALID_ARGUMENT", "the prompt is empty", "refused", False),
        ("UNAVAILABLE", "the queue is full", "unavailable", False),
        ("UNAVAILABLE", "the deadline has passed", "unavailable", False),
        ("UNAVAILABLE", "failed to connect to all addresses", "unavailable", True),
        ("UNAVAILABLE", "Socket closed", "unavailable", True),
        ("StatusCode.DEADLINE_EXCEEDED", "Deadline Exceeded", "unavailable", True),
        ("CANCELLED", None, "cancelled", False),
        ("INTERNAL", "Socket closed", "failed", False),
        (None, None, "failed", False),
    ],
)
def test_whose_fault_an_error_is(
    status: str | None, message: str | None, problem: str, unreachable: bool
) -> None:
    error = explain(status, message, "host:1")
    assert (error.problem, error.unreachable, error.where) == (problem, unreachable, "host:1")
    assert error.what and (error.fix is not None) == unreachable


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("Request for unknown model: 'x' is not found", "UNAVAILABLE"),
        ("Failed to process the request(s) for model 'x'", "INTERNAL"),
        ("temperature: -1 is below 0", "INVALID_ARGUMENT"),
    ],
)
def test_statuses_that_a_stream_does_not_carry(message: str, status: str) -> None:
    assert guess_status(message) == status


def test_a_value_of_another_type() -> None:
    with pytest.raises(DflashError, match="top_k: is INT32, which 'many' is not"):
        make_input("top_k", "INT32", ["many"])

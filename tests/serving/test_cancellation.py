"""Whoever goes away, or says stop, frees the slot; queue and deadlines; slow readers."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_trt.serving.server.launcher import ServerAddresses
from tests.serving.conftest import Generate, counting, wait_idle
from tests.serving.served import (
    CLASSIC,
    ENDLESS,
    LLM,
    LONG_CONTEXT,
    PROMPTS,
    Answer,
    StreamClient,
    ask_grpc,
    long_fields,
    make_fields,
    make_stop,
    post,
    read_metrics,
)
from tests.waiting import wait_until

CANCELLED = 'dflash_requests_total{outcome="cancelled"}'


def count_held(addresses: ServerAddresses) -> tuple[float, float]:
    """Requests in slots, and those that wait for one."""
    metrics = read_metrics(addresses.metrics)
    return metrics["dflash_active_slots"], metrics["dflash_waiting_requests"]


@pytest.mark.parametrize("model", [LLM, CLASSIC])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_closed_stream_frees_the_slot(
    long_addresses: ServerAddresses, model: str, streaming: bool
) -> None:
    """Also where no message has come yet, nor will."""
    with counting(long_addresses, 1) as grown:
        client = StreamClient(long_addresses.grpc)
        client.send(model, long_fields(model, PROMPTS[0], stream=streaming), parameters=ENDLESS)
        if streaming:
            next(client.receive())
        else:
            wait_until(lambda: count_held(long_addresses) == (1, 0))
        client.close(cancel=True)
    assert grown[CANCELLED] == 1
    # It had more than 2,000 steps to go.
    assert grown["dflash_verify_steps_total"] < 1000


@pytest.mark.parametrize("model", [LLM, CLASSIC])
def test_stop_by_id(long_addresses: ServerAddresses, generate: Generate, model: str) -> None:
    """The request ends with what it had; another of the same model, and its own id, goes on."""
    address = long_addresses.grpc
    begin = generate(PROMPTS[0], max_tokens=500, ignore_eos=True).text
    assert begin is not None
    fields = long_fields(model, PROMPTS[0])
    if model == LLM:
        fields["return_finish_reason"] = True
    with (
        counting(long_addresses, 2) as grown,
        StreamClient(address) as client,
        StreamClient(address) as other,
    ):
        client.send(model, fields, request_id="one", parameters=ENDLESS)
        messages = client.receive()
        texts = [next(messages)["text_output"]]
        other.send(model, long_fields(model, PROMPTS[1]), request_id="two", parameters=ENDLESS)
        assert ask_grpc(address, model, make_stop(model), request_id="nobody").error is None
        assert ask_grpc(address, model, make_stop(model), request_id="one") == Answer()
        rest = list(messages)
        texts += [message["text_output"] for message in rest]
        text = texts[-1] if model == LLM else "".join(texts)
        assert begin.startswith(text) or text.startswith(begin)
        if model == LLM:
            assert rest[-1]["finish_reason"] == "cancelled"
        assert next(other.receive())
        other.close(cancel=True)
    assert grown[CANCELLED] == 2


def test_a_deadline(long_addresses: ServerAddresses) -> None:
    options = {"timeout": 60_000, "parameters": ENDLESS}
    with counting(long_addresses, 2) as grown:
        for model in (LLM, CLASSIC):
            fields = long_fields(model, PROMPTS[0])
            answer = ask_grpc(long_addresses.grpc, model, fields, **options)
            assert "the deadline has passed" in answer.failure
    assert grown['dflash_requests_total{outcome="timed_out"}'] == 2


def test_a_slow_reader_delays_nobody(addresses: ServerAddresses, generate: Generate) -> None:
    """A client that does not read for a while; others are served meanwhile; it then gets all."""
    expected = generate(PROMPTS[1], max_tokens=48).text
    host, _, port = addresses.http.rpartition(":")
    slow = socket.create_connection((host, int(port)))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
    body = json.dumps(long_fields(LLM, PROMPTS[0]) | ENDLESS).encode()
    head = f"POST /v2/models/{LLM}/generate_stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    for _ in range(5):
        assert ask_grpc(addresses.grpc, LLM, make_fields(LLM, PROMPTS[1])).texts == [expected]
    wait_idle(addresses)  # its own request has ended too
    data = b""
    while piece := slow.recv(1 << 16):
        data += piece
    slow.close()
    full = generate(PROMPTS[0], max_tokens=2 * LONG_CONTEXT, ignore_eos=True).text
    events = [line for line in data.splitlines() if line.startswith(b"data:")]
    assert json.loads(events[-1].removeprefix(b"data:"))["text_output"] == full


@pytest.mark.parametrize("model", [LLM, CLASSIC])
def test_a_full_queue_says_so_at_once(
    long_addresses: ServerAddresses, generate: Generate, model: str
) -> None:
    # `ensemble` counts its own refusals nowhere.
    with counting(long_addresses, 15 if model == LLM else 10) as grown:
        clients = [StreamClient(long_addresses.grpc) for _ in range(10)]
        for client in clients:
            client.send(model, long_fields(model, PROMPTS[0]), parameters=ENDLESS)
        wait_until(lambda: count_held(long_addresses) == (8, 2))
        fields = long_fields(model, PROMPTS[1])
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask_grpc, long_addresses.grpc, model, fields) for _ in range(4)]
        assert all("queue is full" in one.result().failure for one in asked)
        status, reply = post(long_addresses.http, f"{model}/generate", fields)
        assert status >= 400 and "queue is full" in reply["error"]
        assert count_held(long_addresses) == (8, 2), "they were told while all of it was held"
        for client in clients:
            client.close(cancel=True)
    assert grown[CANCELLED] == 10
    if model == LLM:
        answer = ask_grpc(long_addresses.grpc, LLM, make_fields(LLM, PROMPTS[1]))
        assert answer.texts == [generate(PROMPTS[1], max_tokens=48).text]

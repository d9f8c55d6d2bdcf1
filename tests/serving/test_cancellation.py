"""Whoever goes away, or says stop, frees the slot; queue and deadlines; slow readers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_trt.serving.server.launcher import ServerAddresses
from tests.serving.conftest import Generate, counting
from tests.serving.served import (
    CLASSIC,
    ENDLESS,
    LLM,
    PROMPTS,
    QUEUE,
    SLOTS,
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
    addresses: ServerAddresses, model: str, streaming: bool
) -> None:
    """Also where no message has come yet, nor will."""
    with counting(addresses, 1) as grown:
        client = StreamClient(addresses.grpc)
        client.send(model, long_fields(model, PROMPTS[0], stream=streaming), parameters=ENDLESS)
        if streaming:
            next(client.receive())
        else:
            wait_until(lambda: count_held(addresses) == (1, 0))
        client.close(cancel=True)
    assert grown[CANCELLED] == 1
    # It had more than 2,000 steps to go.
    assert grown["dflash_verify_steps_total"] < 1000


@pytest.mark.parametrize("model", [LLM, CLASSIC])
def test_stop_by_id(addresses: ServerAddresses, generate: Generate, model: str) -> None:
    """The request ends with what it had; another of the same model, and its own id, goes on."""
    address = addresses.grpc
    begin = generate(PROMPTS[0], max_tokens=500, ignore_eos=True).text
    assert begin is not None
    fields = long_fields(model, PROMPTS[0])
    if model == LLM:
        fields["return_finish_reason"] = True
    with (
        counting(addresses, 2) as grown,
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


def test_a_deadline(addresses: ServerAddresses) -> None:
    options = {"timeout": 60_000, "parameters": ENDLESS}
    with counting(addresses, 2) as grown:
        for model in (LLM, CLASSIC):
            fields = long_fields(model, PROMPTS[0])
            answer = ask_grpc(addresses.grpc, model, fields, **options)
            assert "the deadline has passed" in answer.failure
    assert grown['dflash_requests_total{outcome="timed_out"}'] == 2


@pytest.mark.parametrize("model", [LLM, CLASSIC])
def test_a_full_queue_says_so_at_once(
    addresses: ServerAddresses, generate: Generate, model: str
) -> None:
    # `ensemble` counts its own refusals nowhere.
    with counting(addresses, 5 + SLOTS + QUEUE if model == LLM else SLOTS + QUEUE) as grown:
        clients = [StreamClient(addresses.grpc) for _ in range(SLOTS + QUEUE)]
        for client in clients:
            client.send(model, long_fields(model, PROMPTS[0]), parameters=ENDLESS)
        wait_until(lambda: count_held(addresses) == (SLOTS, QUEUE))
        fields = long_fields(model, PROMPTS[1])
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask_grpc, addresses.grpc, model, fields) for _ in range(4)]
        assert all("queue is full" in one.result().failure for one in asked)
        status, reply = post(addresses.http, f"{model}/generate", fields)
        assert status >= 400 and "queue is full" in reply["error"]
        assert count_held(addresses) == (SLOTS, QUEUE), "they were told while all of it was held"
        for client in clients:
            client.close(cancel=True)
    assert grown[CANCELLED] == SLOTS + QUEUE
    if model == LLM:
        answer = ask_grpc(addresses.grpc, LLM, make_fields(LLM, PROMPTS[1]))
        assert answer.texts == [generate(PROMPTS[1], max_tokens=48).text]

"""Many requests of every kind at once: each ends exactly once, with the right text or error.

`DFLASH_STRESS_REQUESTS=2000` and `-m exhaustive` run the full number.
"""

from __future__ import annotations

import itertools
import os
import queue
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from dflash_trt.runtime import SamplingParams
from dflash_trt.serving.server.launcher import ServerAddresses, TritonServer
from tests.covering import exhaustive
from tests.serving.client import CLASSIC, LLM, StreamClient, ask_grpc, make_fields, make_stop
from tests.serving.conftest import Generate, count_ended, wait_idle
from tests.serving.served import GREEDY, PROMPTS, measure_memory

REQUESTS = int(os.environ.get("DFLASH_STRESS_REQUESTS", "300"))
CLIENTS = 32
MEMORY_MARGIN = 0.02
KINDS = ("whole", "streamed", "streamed", "stopped", "cancelled", "left", "refused")


@dataclass(frozen=True)
class Case:
    """A request, what is done to it, and how `generate` would end it."""

    number: int
    kind: str
    model: str
    fields: dict[str, Any]
    expected: str


@pytest.fixture(scope="module")
def pool_of_cases(generate: Generate) -> list[Case]:
    """Sixty-four distinct requests with their texts; runs draw from them."""
    randoms = random.Random(5)
    cases: list[Case] = []
    for number in range(64):
        prompt = PROMPTS[number % len(PROMPTS)][: randoms.randint(10, 200)]
        max_tokens = randoms.choice((1, 2, 7, 20, 40, 80))
        drawn = SamplingParams(temperature=0.8, seed=number)
        narrowed = SamplingParams(temperature=1.1, top_k=30, seed=1)
        sampling = randoms.choice((GREEDY, drawn, narrowed))
        text = generate(prompt, sampling, max_tokens=max_tokens).text
        assert text is not None
        kind = KINDS[number % len(KINDS)]
        model = (LLM, CLASSIC)[number % 3 == 2]
        shown = "" if kind == "refused" else prompt
        fields = make_fields(model, shown, sampling, max_tokens=max_tokens, stream=kind != "whole")
        if kind == "stopped" and len(text) > 4:
            stop = text[len(text) // 2 : len(text) // 2 + 3]
            fields["sampling_param_stop" if model == LLM else "stop_words"] = stop
            text = text[: text.index(stop)]
        cases.append(Case(number, kind, model, fields, text))
    return cases


def _run_case(client: StreamClient, case: Case, request_id: str) -> str:
    """Runs a case; the outcome's name, or what was wrong with it."""
    client.send(case.model, case.fields, request_id=request_id)
    texts: list[str] = []
    try:
        for message in client.receive():
            texts.append(message["text_output"])
            if case.kind == "cancelled" and len(texts) == 1:
                ask_grpc(client.address, case.model, make_stop(case.model), request_id=request_id)
    except InferenceServerException as error:
        expected = case.kind == "refused" and "prompt is empty" in str(error.message())
        return "refused" if expected else f"{case}: {error.message()}"
    except queue.Empty:
        return f"{case}: lost"
    text = "".join(texts) if case.model == CLASSIC else (texts or [""])[-1]
    if case.kind == "refused":
        return f"{case}: was not refused"
    if case.kind == "cancelled" and case.expected.startswith(text):
        return "cancelled"
    return "completed" if text == case.expected else f"{case}: {text!r}"


def _leave(address: str, case: Case) -> str:
    """Sends a request and goes away, sometimes after its first message."""
    client = StreamClient(address)
    client.send(case.model, case.fields)
    if case.number % 2:
        next(client.receive(), None)
    client.close(cancel=True)
    return "left"


def _run(address: str, cases: Iterator[Case]) -> Counter[str]:
    """All cases, thirty-two at a time; outcomes."""
    outcomes: Counter[str] = Counter()
    lock = threading.Lock()

    def work(worker: int) -> None:
        with StreamClient(address) as client:
            for turn in itertools.count():
                with lock:
                    case = next(cases, None)
                if case is None:
                    return
                if case.kind == "left":
                    outcome = _leave(address, case)
                else:
                    outcome = _run_case(client, case, f"{worker}-{turn}")
                with lock:
                    outcomes[outcome] += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(work, range(CLIENTS)))
    return outcomes


@pytest.mark.parametrize("count", [100, exhaustive(REQUESTS)])
def test_every_request_ends_once_and_right(
    server: TritonServer, addresses: ServerAddresses, pool_of_cases: list[Case], count: int
) -> None:
    randoms = random.Random(3)
    warmed = _run(addresses.grpc, iter(randoms.choices(pool_of_cases, k=max(50, count // 2))))
    before = wait_idle(addresses)
    memory = measure_memory(server.pid)
    cases = randoms.choices(pool_of_cases, k=count)
    outcomes = _run(addresses.grpc, iter(cases))
    wrong = [outcome for outcome in outcomes if ":" in outcome]
    assert not wrong, wrong[:3]
    assert sum(outcomes.values()) == count
    # A client that leaves at once may be gone before the server has read its request, or before
    # the server has told anybody of it.
    after = wait_idle(addresses, count_ended(before) + count - outcomes["left"])
    assert count_ended(after) - count_ended(before) <= count + warmed["left"]
    for outcome in ("failed", "overflow", "timed_out"):
        name = f'dflash_requests_total{{outcome="{outcome}"}}'
        assert after[name] == before[name], name
    grown = measure_memory(server.pid) / memory - 1
    print(f"{count} requests: {dict(outcomes)}; memory {memory / 2**20:.0f} MiB, {grown:+.2%}")
    if count >= 2000:
        assert grown < MEMORY_MARGIN

"""Many requests of every kind at once: each ends exactly once, with the right text or error.

`DFLASH_STRESS_REQUESTS=8000` and `-m exhaustive` run the full number, after a quarter of it to warm
up; what the exhaustive tests run is about half a minute of it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tritonclient.utils import InferenceServerException

from dflash_trt.decoding import SamplingParams
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.serving.client import CLASSIC, LLM, StreamClient, ask_grpc, make_fields, make_stop
from tests.serving.conftest import Generate, count_ended, wait_idle
from tests.serving.served import (
    GREEDY,
    PROMPTS,
    Served,
    fetch,
    measure_processes,
    package,
    serving,
)
from tests.waiting import PATIENCE_S

REQUESTS = int(os.environ.get("DFLASH_STRESS_REQUESTS", "1000"))
CLIENTS = 32
GROWTH = 1 << 10
"""Bytes of memory that a process may take for each request, in the long run."""
LONG_RUN = 8000
SETTLING = 8 << 20
"""Bytes that a process may take besides in a shorter one, where arenas still grow."""
OVER_GRPC = ("whole", "streamed", "stopped", "cancelled", "left", "refused")
OVER_HTTP = ("posted", "events", "chat", "hung up", "hostile")
HOSTILE: list[tuple[Any, int]] = [
    (b"{" * 20_000, 400),
    (b'{"model": "demo", "prompt": "\xff"}', 400),
    ({"model": "demo", "prompt": "x", "max_tokens": "many"}, 400),
    ({"model": "demo", "prompt": "1 " * 600, "max_tokens": 4}, 400),
    ({"model": "another", "prompt": "x"}, 404),
]


@dataclass(frozen=True)
class Case:
    """A request, what is done to it, and how `generate` would end it."""

    kind: str
    model: str
    fields: Any
    expected: str


@pytest.fixture(scope="module")
def soaked(
    tritonserver: TritonServerBinary, chat_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A pair of its own behind both ports: what is counted is all that it was asked."""
    repository = tmp_path_factory.mktemp("soaked") / "repository"
    with serving(package(chat_bundle, repository, block_schedule="none"), chat_bundle) as running:
        yield running


def _make_case(number: int, generate: Generate) -> Case:
    chance = random.Random(number)
    kinds = OVER_GRPC + OVER_HTTP
    kind, prompt = kinds[number % len(kinds)], chance.choice(PROMPTS)[: chance.randint(10, 200)]
    if kind == "hostile":
        fields, status = chance.choice(HOSTILE)
        return Case(kind, "", fields, str(status))
    max_tokens = chance.choice((1, 2, 7, 20, 40, 80))
    drawn = SamplingParams(temperature=0.8, seed=number)
    sampling = chance.choice((GREEDY, drawn, SamplingParams(temperature=1.1, top_k=30, seed=1)))
    asked = [{"role": "user", "content": prompt}] if kind == "chat" else prompt
    text = generate(asked, sampling, max_tokens=max_tokens).text or ""
    if kind in OVER_HTTP:
        fields = {"model": "demo", "max_tokens": max_tokens, "stream": kind != "posted"}
        fields["messages" if kind == "chat" else "prompt"] = asked
        fields |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "seed")}
        return Case(kind, "", fields, text)
    model, shown = chance.choice((LLM, CLASSIC)), "" if kind == "refused" else prompt
    fields = make_fields(model, shown, sampling, max_tokens=max_tokens, stream=kind != "whole")
    if kind == "stopped" and len(text) > 4:
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        fields["sampling_param_stop" if model == LLM else "stop_words"] = stop
        text = text[: text.index(stop)]
    return Case(kind, model, fields, text)


def _run_grpc(client: StreamClient, case: Case, request_id: str) -> str:
    """Runs a case; the outcome's name, or what was wrong with it."""
    texts: list[str] = []
    try:
        client.send(case.model, case.fields, request_id=request_id)
        for message in client.receive():
            texts.append(message["text_output"])
            if case.kind == "cancelled" and len(texts) == 1:
                ask_grpc(client.address, case.model, make_stop(case.model), request_id=request_id)
    except InferenceServerException as error:
        expected = case.kind == "refused" and "prompt is empty" in str(error.message())
        return "refused" if expected else f"{case}: {error.message()}"
    text = "".join(texts) if case.model == CLASSIC else (texts or [""])[-1]
    if case.kind == "cancelled" and case.expected.startswith(text):
        return "cancelled"
    is_right = case.kind != "refused" and text == case.expected
    return "completed" if is_right else f"{case}: {text!r}"


def _leave(served: Served, case: Case) -> str:
    """Sends a request and goes away, over gRPC sometimes after its first message."""
    if case.kind == "left":
        client = StreamClient(served.address)
        client.send(case.model, case.fields)
        if len(case.expected) % 2:
            next(client.receive(), None)
        client.close(cancel=True)
        return "left"
    body = json.dumps(case.fields)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    host, _, port = urlsplit(served.openai).netloc.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        connection.recv(200)
    return "left"


def _run_http(served: Served, case: Case) -> str:
    """The same over OpenAI's port."""
    path = "/v1/chat/completions" if case.kind == "chat" else "/v1/completions"
    status, content, _ = fetch(urlsplit(served.openai).netloc, path, case.fields)
    if case.kind == "hostile":
        is_right = str(status) == case.expected and b'"error"' in content
        return "hostile" if is_right else f"{case}: {status} {content[:200]!r}"
    text = _text_of(content) if status == 200 else None
    return "completed" if text == case.expected else f"{case}: {status} {content!r:.500}"


def _text_of(content: bytes) -> str | None:
    """The text of an answer, whole or of events; None where it is not as it should be."""
    if content.startswith(b"{"):
        return str(json.loads(content)["choices"][0]["text"])
    *events, done = content.decode().removesuffix("\n\n").split("\n\n")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    ends = [one["finish_reason"] for one in choices if one["finish_reason"] is not None]
    if done != "data: [DONE]" or len(ends) != 1:
        return None
    return "".join(
        one["text"] if "text" in one else one["delta"].get("content") or "" for one in choices
    )


def _run(served: Served, cases: Iterator[Case]) -> Counter[str]:
    """All cases, thirty-two at a time; outcomes."""
    outcomes: Counter[str] = Counter()
    lock = threading.Lock()

    def work(worker: int) -> None:
        with StreamClient(served.address) as client:
            for turn in itertools.count():
                with lock:
                    case = next(cases, None)
                if case is None:
                    return
                if case.kind in ("left", "hung up"):
                    outcome = _leave(served, case)
                elif case.kind in OVER_HTTP:
                    outcome = _run_http(served, case)
                else:
                    outcome = _run_grpc(client, case, f"{worker}-{turn}")
                with lock:
                    outcomes[outcome] += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(work, range(CLIENTS)))
    wrong = [outcome for outcome in outcomes if ":" in outcome]
    assert not wrong, wrong[:3]
    return outcomes


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [REQUESTS])
def test_every_request_ends_once_and_right(soaked: Served, generate: Generate, count: int) -> None:
    cases, chance = [_make_case(number, generate) for number in range(110)], random.Random(3)
    warmed = _run(soaked, iter(chance.choices(cases, k=max(50, count // 4))))
    before, memory = wait_idle(soaked), measure_processes(soaked.pid)
    outcomes = _run(soaked, iter(chance.choices(cases, k=count)))
    assert sum(outcomes.values()) == count
    # A client that leaves at once may be gone before the server has read its request, or before
    # the server has told anybody of it. The front refuses what is hostile.
    asked = count - outcomes["hostile"]
    after = wait_idle(soaked, count_ended(before) + asked - outcomes["left"])
    assert count_ended(after) - count_ended(before) <= asked + warmed["left"]
    for outcome in ("failed", "overflow", "timed_out"):
        name = f'dflash_requests_total{{outcome="{outcome}"}}'
        assert after[name] == before[name], name
    heaps = measure_processes(soaked.pid)
    assert set(heaps) == set(memory), "a process was replaced"
    grown = {pid: (heaps[pid] - memory[pid]) / count for pid in heaps}
    print(json.dumps({"requests": count, "outcomes": outcomes, "bytes a request": grown}))
    assert max(grown.values()) <= GROWTH + (SETTLING / count if count < LONG_RUN else 0)

"""Many requests of every kind at once: each ends exactly once, with the right text or error.

`DFLASH_STRESS_REQUESTS=8000` and `-m exhaustive` run the full number, after a quarter of it to warm
up; what the daily and the exhaustive tests run is a few seconds and about a minute of it.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tritonclient.utils import InferenceServerException

from dflash_trt.runtime import SamplingParams
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
OVER_GRPC = ("whole", "streamed", "streamed", "stopped", "cancelled", "left", "refused")
OVER_HTTP = ("posted", "events", "chat", "slow", "hung up", "killed", "hostile")
HOSTILE: list[tuple[Any, int]] = [
    (b"{" * 20_000, 400),
    (b'{"model": "demo", "prompt": "\xff"}', 400),
    ({"model": "demo", "prompt": "x", "max_tokens": "many"}, 400),
    ({"model": "demo", "prompt": "", "max_tokens": 4}, 400),
    ({"model": "demo", "prompt": "1 " * 600, "max_tokens": 4}, 400),
    ({"model": "another", "prompt": "x"}, 404),
]
NAMES = {
    "tritonserver --id": "tritonserver",
    "/tensorrt_llm/": "tensorrt_llm",
    "/ensemble/": "ensemble",
    "guard.py": "guard",
    "sandbox_worker.py template": "chat templates",
    " serve ": "serve",
}


@dataclass(frozen=True)
class Case:
    """A request, what is done to it, and how `generate` would end it."""

    number: int
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


@pytest.fixture(scope="module")
def pool_of_cases(generate: Generate) -> list[Case]:
    """Distinct requests of every kind with their texts; runs draw from them."""
    randoms = random.Random(5)
    cases: list[Case] = []
    for number in range(112):
        prompt = PROMPTS[number % len(PROMPTS)][: randoms.randint(10, 200)]
        max_tokens = randoms.choice((1, 2, 7, 20, 40, 80))
        drawn = SamplingParams(temperature=0.8, seed=number)
        narrowed = SamplingParams(temperature=1.1, top_k=30, seed=1)
        sampling = randoms.choice((GREEDY, drawn, narrowed))
        kind = (OVER_GRPC + OVER_HTTP)[number % 14]
        asked = [{"role": "user", "content": prompt}] if kind == "chat" else prompt
        text = generate(asked, sampling, max_tokens=max_tokens).text
        assert text is not None
        if kind in OVER_HTTP:
            fields: Any = {"model": "demo", "max_tokens": max_tokens, "stream": kind != "posted"}
            fields["messages" if kind == "chat" else "prompt"] = asked
            fields |= {"temperature": sampling.temperature, "top_k": sampling.top_k}
            fields |= {"seed": sampling.seed}
            if kind == "hostile":
                fields, status = HOSTILE[number // 14 % len(HOSTILE)]
                text = str(status)
            cases.append(Case(number, kind, "", fields, text))
            continue
        model = (LLM, CLASSIC)[number % 3 == 2]
        shown = "" if kind == "refused" else prompt
        fields = make_fields(model, shown, sampling, max_tokens=max_tokens, stream=kind != "whole")
        if kind == "stopped" and len(text) > 4:
            stop = text[len(text) // 2 : len(text) // 2 + 3]
            fields["sampling_param_stop" if model == LLM else "stop_words"] = stop
            text = text[: text.index(stop)]
        cases.append(Case(number, kind, model, fields, text))
    return cases


def _draw(cases: list[Case], randoms: random.Random, count: int) -> list[Case]:
    """Of the cases that start a Python process fewer than of the others."""
    weights = [0.1 if one.kind == "killed" and one.number % 4 else 1 for one in cases]
    return randoms.choices(cases, weights, k=count)


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


def _run_http(served: Served, case: Case) -> str:
    """The same over OpenAI's port."""
    address = urlsplit(served.openai).netloc
    path = "/v1/chat/completions" if case.kind == "chat" else "/v1/completions"
    if case.kind == "hostile":
        status, content, _ = fetch(address, path, case.fields)
        refused = str(status) == case.expected and b'"error"' in content
        return "hostile" if refused else f"{case.number}: {status} {content[:200]!r}"
    if case.kind == "killed":
        return _kill(served, address, case)
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(case.fields), headers)
        with connection.getresponse() as answer:
            content = (
                answer.read(200 if case.kind == "hung up" else None)
                if (case.kind != "slow")
                else b"".join(_read_slowly(answer))
            )
            status = answer.status
    finally:
        connection.close()
    if case.kind == "hung up":
        return "left"
    text = _text_of(content) if status == 200 else None
    return "completed" if text == case.expected else f"{case}: {status} {content!r:.500}"


def _read_slowly(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    while piece := answer.read(200):
        yield piece
        time.sleep(0.01)


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


DYING = """
import sys, time
from tests.serving.client import LLM, StreamClient, make_fields
client = StreamClient(sys.argv[1])
client.send(LLM, make_fields(LLM, "host", max_tokens=400, stream=True))
next(client.receive())
print("begun", flush=True)
time.sleep(600)
"""


def _kill(served: Served, address: str, case: Case) -> str:
    """A client's process asks, and is killed when its answer has begun."""
    if case.number % 4:
        command = [sys.executable, "-c", DYING, served.address]
    else:
        body = json.dumps(case.fields)
        request = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        )
        script = 'exec 3<>"/dev/tcp/$0/$1"; printf %s "$2" >&3; exec cat <&3'
        command = ["bash", "-c", script, *address.split(":"), request]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        begun = process.stdout.readline()
        process.kill()
    return "left" if begun else f"{case}: the client that was to die got no answer"


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
                if case.kind in OVER_HTTP:
                    outcome = _run_http(served, case)
                elif case.kind == "left":
                    outcome = _leave(served.address, case)
                else:
                    outcome = _run_grpc(client, case, f"{worker}-{turn}")
                with lock:
                    outcomes[outcome] += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(work, range(CLIENTS)))
    return outcomes


def _name(pid: int) -> str:
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return next((name for mark, name in NAMES.items() if mark in arguments), arguments)


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [REQUESTS])
def test_every_request_ends_once_and_right(
    soaked: Served, pool_of_cases: list[Case], count: int
) -> None:
    randoms = random.Random(3)
    warmed = _run(soaked, iter(_draw(pool_of_cases, randoms, max(50, count // 4))))
    before = wait_idle(soaked)
    memory = measure_processes(soaked.pid)
    started = time.monotonic()
    outcomes = _run(soaked, iter(_draw(pool_of_cases, randoms, count)))
    seconds = time.monotonic() - started
    wrong = [outcome for outcomes in (warmed, outcomes) for outcome in outcomes if ":" in outcome]
    assert not wrong, wrong[:3]
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
    grown = {_name(pid): round((heaps[pid] - memory[pid]) / count) for pid in heaps}
    report = {"warm-up": sum(warmed.values()), "requests": count, "seconds": round(seconds, 1)}
    heaps_mib = {_name(pid): round(heap / 2**20, 1) for pid, heap in heaps.items()}
    report |= {"outcomes": outcomes, "bytes a request": grown, "MiB": heaps_mib}
    print(json.dumps(report))
    for name, growth in grown.items():
        assert growth <= GROWTH + (SETTLING / count if count < LONG_RUN else 0), name

"""`serve --max-queue-size` and `--request-seconds`: who waits, and for how long, on every port."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.cli.conftest import Run
from tests.covering import exhaustive
from tests.serving.client import CLASSIC, LLM, ask_grpc, long_fields
from tests.serving.conftest import wait_idle
from tests.serving.served import PROMPTS, Served, fetch, serving

SECONDS, QUEUE = 2, 3
ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def limited(tritonserver: TritonServerBinary, long_bundle: Path) -> Iterator[Served]:
    options = ["--max-queue-size", str(QUEUE), "--request-seconds", str(SECONDS)]
    with serving(long_bundle, long_bundle, *options) as running:
        yield running


def test_nobody_runs_for_ever(limited: Served) -> None:
    front = urlsplit(limited.openai).netloc

    def ask(streaming: bool) -> tuple[int, bytes, Any]:
        body = {"model": "demo", "prompt": "host", "max_tokens": 16000, "stream": streaming}
        return fetch(front, "/v1/completions", body | ENDLESS)

    with ThreadPoolExecutor(2) as pool:
        streamed, whole = pool.map(ask, (True, False))
    for status, content, headers in (streamed, whole):
        assert content.count(b'"error"') == 1
        if status == 200:  # a stream, which had begun
            *_, content = content.removesuffix(b"\n\n").split(b"data: ")
        else:
            assert status == 504 and headers["x-should-retry"] == "false"
        told = json.loads(content)["error"]
        assert told["code"] == "timeout" and "the deadline has passed" in told["message"]
    assert whole[0] == 504
    figures = wait_idle(limited)
    assert figures['dflash_requests_total{outcome="timed_out"}'] == 2
    assert figures["dflash_waiting_requests_limit"] == QUEUE


@pytest.mark.parametrize("model", [LLM, exhaustive(CLASSIC)])
def test_a_client_may_be_less_patient_and_not_more(limited: Served, model: str) -> None:
    fields = long_fields(model, PROMPTS[0])

    def measure(own_s: float) -> float:
        options: dict[str, Any] = {"timeout_us": int(own_s * 1e6), "parameters": ENDLESS}
        started = time.monotonic()
        answer = ask_grpc(limited.address, model, fields, **options)
        assert "the deadline has passed" in answer.failure
        return time.monotonic() - started

    # The machine may have much else to do, but not each time.
    assert min(measure(0.1) for _ in range(3)) < SECONDS <= measure(100)


def test_a_repository_has_decided(run: Run, bundle: Bundle, tmp_path: Path) -> None:
    options = ["--max-queue-size", "3", "--request-seconds", "60", "--no-speculation"]
    outcome = run("package", bundle.folder, "-o", tmp_path / "repository", *options)
    said = "a queue of 3, threads by the machine that serves, 60 s for a request, no speculation\n"
    assert outcome.code == 0 and outcome.out.endswith(said)
    config = (tmp_path / "repository" / LLM / "config.pbtxt").read_text(encoding="utf-8")
    assert '"request_seconds"  value: { string_value: "60" }' in config
    for option in (["--max-queue-size", "3"], ["--request-seconds", "1"], ["--no-speculation"]):
        refused = run("serve", tmp_path / "repository", *option)
        refused.fails(2, f"error: {option[0]}: is a model repository, whose config.pbtxt says")
        assert f"`dflash-trt package {option[0]}`" in refused.err

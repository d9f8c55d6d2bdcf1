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
from tests.serving.client import CLASSIC, LLM, ask_grpc, long_fields, read_metrics
from tests.serving.conftest import wait_idle
from tests.serving.served import PROMPTS, SLOTS, Served, fetch, serving
from tests.waiting import wait_until

SECONDS = 4
ENDLESS: dict[str, Any] = {"model": "demo", "prompt": "host", "ignore_eos": True}


@pytest.fixture(scope="module")
def limited(tritonserver: TritonServerBinary, long_bundle: Path) -> Iterator[Served]:
    options = ["--max-queue-size", "0", "--request-seconds", str(SECONDS)]
    with serving(long_bundle, long_bundle, *options) as running:
        yield running


def test_who_finds_no_place_is_told_and_nobody_runs_for_ever(limited: Served) -> None:
    front = urlsplit(limited.openai).netloc

    def ask(streaming: bool) -> tuple[int, bytes, Any]:
        return fetch(front, "/v1/completions", ENDLESS | {"stream": streaming, "max_tokens": 16000})

    with ThreadPoolExecutor(SLOTS) as pool:
        running = [pool.submit(ask, slot % 2 == 0) for slot in range(SLOTS)]
        wait_until(lambda: read_metrics(limited.metrics)["dflash_active_slots"] == SLOTS)
        status, content, headers = ask(False)
        assert status == 503 and headers["Retry-After"] and b"the queue is full" in content
        for slot, answer in enumerate(one.result() for one in running):
            status, content, headers = answer
            if slot % 2 == 0:  # a stream, which had begun
                assert status == 200 and content.count(b'"error"') == 1
                *_, content = content.removesuffix(b"\n\n").split(b"data: ")
            else:
                assert status == 504 and headers["x-should-retry"] == "false"
            told = json.loads(content)["error"]
            assert told["code"] == "timeout" and "the deadline has passed" in told["message"]
    figures = wait_idle(limited)
    assert figures['dflash_requests_total{outcome="timed_out"}'] == SLOTS
    assert figures['dflash_requests_total{outcome="overflow"}'] == 1


@pytest.mark.parametrize("model", [LLM, CLASSIC])
def test_a_client_may_be_less_patient_and_not_more(limited: Served, model: str) -> None:
    fields = long_fields(model, PROMPTS[0])
    for own_s, least, most in ((0.1, 0.1, SECONDS), (100, SECONDS, 100)):
        started = time.monotonic()
        options: dict[str, Any] = {"timeout_us": int(own_s * 1e6)}
        answer = ask_grpc(
            limited.address, model, fields, parameters={"ignore_eos": True}, **options
        )
        assert "the deadline has passed" in answer.failure
        assert least <= time.monotonic() - started < most


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

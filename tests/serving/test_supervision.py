"""A server that dies or hangs: told within seconds, and served again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from dflash_perf.bench import kill_campaign

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.decoding.worker import Phase
from dflash_trt.serving.client.errors import ServedModelError
from dflash_trt.serving.server.heartbeat import (
    HEARTBEAT_VARIABLE,
    PING_S,
    Beat,
    HeartbeatWriter,
    SilenceWatch,
    read_heartbeat,
)
from dflash_trt.serving.server.processes import find_models, read_state
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.serving.client import LLM, ask_grpc, long_fields, read_metrics
from tests.serving.conftest import Generate
from tests.serving.served import PROMPTS, Served, fetch
from tests.waiting import wait_until

HANG_S = 300.0


def find_server(serve_pid: int) -> int:
    """Process id of the Triton server that `serve` runs."""
    for process in filter(lambda one: one.name.isdecimal(), Path("/proc").iterdir()):
        _, parent_pid = read_state(process)
        if parent_pid == serve_pid and b"tritonserver --id" in _arguments(process):
            return int(process.name)
    raise AssertionError("there is no server")


def _arguments(process: Path) -> bytes:
    return (process / "cmdline").read_bytes().replace(b"\0", b" ")


def test_a_lost_model_is_told_and_replaced(served: Served, generate: Generate) -> None:
    """Each request ends with one error, and the next server answers as the first."""
    address = urlsplit(served.openai).netloc
    body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 900, "ignore_eos": True}
    body["temperature"] = 0

    def ask(kind: str) -> Any:
        if kind == "grpc":
            return ask_grpc(served.address, LLM, long_fields(LLM, PROMPTS[0])).error
        return fetch(address, "/v1/completions", body | {"stream": kind == "streamed"})[:2]

    failures, server = _count_failures(address), find_server(served.pid)
    (model,) = (pid for pid, name in find_models(server).items() if name == LLM)
    kinds = ("whole", "streamed", "grpc")
    with ThreadPoolExecutor(len(kinds)) as pool:
        asked = [pool.submit(ask, kind) for kind in kinds]
        wait_until(lambda: read_metrics(served.metrics)["dflash_active_slots"] == len(kinds))
        os.kill(model, signal.SIGKILL)
        wait_until(lambda: fetch(address, "/health", b"", "GET")[0] == 503, "an honest answer")
        whole, streamed, error = (one.result() for one in asked)
    for path, method in (("/v1/models", "GET"), ("/v1/completions", "POST")):
        status, content, headers = fetch(address, path, body, method)
        assert status == 503 and headers["Retry-After"], path
        assert json.loads(content)["error"]["code"] == "unavailable"
    assert whole[0] == 503 and streamed[0] in (200, 503)
    assert whole[1].count(b'"error"') == streamed[1].count(b'"error"') == 1
    assert error is not None
    wait_until(lambda: fetch(address, "/health", b"", "GET")[0] == 200, "another server")
    status, content, _ = fetch(address, "/v1/completions", body | {"max_tokens": 32})
    text = json.loads(content)["choices"][0]["text"]
    assert text == generate(PROMPTS[0], max_tokens=32, ignore_eos=True).text
    assert find_server(served.pid) != server
    figures = fetch(address, "/metrics", b"", "GET")[1]
    assert b"\ndflash_ready 1\n" in figures and b"\ndflash_slots 8\n" in figures
    assert _count_failures(address) == failures + 1


def _count_failures(address: str) -> int:
    figures = fetch(address, "/metrics", b"", "GET")[1].decode().splitlines()
    (line,) = (one for one in figures if one.startswith("dflash_server_failures_total "))
    return int(line.split()[1])


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.TURN])
def test_silence(phase: Phase) -> None:
    """A generator that turns is asked nothing; one that is idle may answer instead."""
    asked: list[float] = []
    answering = True

    async def watch() -> None:
        async def ping() -> None:
            asked.append(now)
            if not answering:
                raise ServedModelError("no answer", "unavailable")

        start = now = time.monotonic()
        silence = SilenceWatch(ping, HANG_S)
        nonlocal answering
        for turn in range(100):  # half an hour of turns of 18 s: none is a hang, none is asked
            now = start + 18.0 * turn
            assert silence.find_trouble(Beat(Phase.TURN, turn + 1), now) is None
            await asyncio.sleep(0)
        assert not asked
        last = Beat(phase, 1000)
        began = now
        while now < began + 2 * HANG_S and phase is Phase.IDLE:
            assert silence.find_trouble(last, now) is None
            now += 1.0
            await asyncio.sleep(0)
        assert (len(asked) > 2 * HANG_S / (PING_S + 3)) == (phase is Phase.IDLE)
        answering = False
        silent_from = now
        while (trouble := silence.find_trouble(last, now)) is None:
            now += 1.0
            await asyncio.sleep(0)
        assert HANG_S - PING_S - 3 < now - silent_from <= HANG_S + 2
        assert silence.find_trouble(None, now) is None, "a model of someone else"
        assert silence.find_trouble(Beat(Phase.OPENING, 1001), now) is None
        broken = silence.find_trouble(Beat(Phase.BROKEN, 1002), now)
        assert broken == "the executor failed and could not be opened again"
        what = "nothing was answered" if phase is Phase.IDLE else "no step has ended"
        assert trouble == f"{what} for 300 s"
        await silence.close()

    asyncio.run(watch())


def test_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "heartbeat"
    HeartbeatWriter().beat(Phase.TURN)  # nobody listens
    monkeypatch.setenv(HEARTBEAT_VARIABLE, str(path))
    assert read_heartbeat(path) is None
    writer = HeartbeatWriter()
    assert read_heartbeat(path) is None
    for number, phase in enumerate(Phase, 1):
        writer.beat(phase)
        assert read_heartbeat(path) == Beat(phase, number)


@pytest.mark.exhaustive
def test_every_process_killed_under_load(
    tritonserver: TritonServerBinary, bundle: Bundle, tmp_path: Path
) -> None:
    """And `serve` itself in the end."""
    figures = kill_campaign.measure(kill_campaign.Work(tmp_path, 1), bundle.folder, clients=12)
    assert figures is not None and not figures["lost"]
    assert len(figures["blows"]) == 3 and len(figures["memory_mib"][0]) == 4
    for name, (blow,) in figures["blows"].items():
        assert blow["told_s"] < 2 and blow["back_s"] < 30, name
    assert figures["serve_gone_s"][0] < 5
    for kind in ("whole", "streamed", "grpc"):
        assert figures["outcomes"][f"{kind} right"] and figures["outcomes"][f"{kind} error"]

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
import tritonclient.grpc as grpcclient
from dflash_perf.bench import kill_campaign
from tritonclient.utils import InferenceServerException

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.decoding.worker import Phase
from dflash_trt.serving.client.errors import ServedModelError
from dflash_trt.serving.server.heartbeat import (
    PING_S,
    PROC,
    Beat,
    SilenceWatch,
    find_models,
    read_state,
)
from dflash_trt.serving.server.launcher import (
    ServerAddresses,
    restriction_options,
)
from dflash_trt.serving.server.supervisor import HANG_S
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.serving.conftest import Generate
from tests.serving.served import (
    LLM,
    LONG_CONTEXT,
    PROMPTS,
    Served,
    ask_grpc,
    fetch,
    long_fields,
    make_fields,
    read_metrics,
)
from tests.waiting import wait_until


def find_server(serve_pid: int) -> int:
    """Process id of the Triton server that `serve` runs."""
    children = (one for one in PROC.glob("[0-9]*") if read_state(one)[1] == serve_pid)
    (server,) = (one for one in children if b"--model-repository" in (one / "cmdline").read_bytes())
    return int(server.name)


def _count_failures(address: str) -> int:
    figures = fetch(address, "/metrics", b"", "GET")[1].decode()
    return int(figures.partition('\ndflash_server_failures_total{model="demo"} ')[2].split()[0])


def test_a_lost_model_is_told_and_replaced(served: Served, generate: Generate) -> None:
    """Each request ends with one error, and the next server answers as the first."""
    address = urlsplit(served.openai).netloc
    body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": LONG_CONTEXT, "ignore_eos": True}
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
    assert b'\ndflash_ready{model="demo"} 1\n' in figures
    assert b'\ndflash_slots{model="demo"} 8\n' in figures
    assert _count_failures(address) == failures + 1


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.TURN])
def test_silence(phase: Phase) -> None:
    """A generator that turns is asked nothing; one that is idle may answer instead."""
    asked: list[float] = []
    now, answering = time.monotonic(), True

    async def ping() -> None:
        asked.append(now)
        if not answering:
            raise ServedModelError("no answer", "unavailable")

    async def watch() -> None:
        nonlocal now, answering
        silence = SilenceWatch(ping, HANG_S)

        async def look(beat: Beat | None, seconds: float) -> str | None:
            nonlocal now
            now += seconds
            trouble = silence.find_trouble(beat, now)
            await asyncio.sleep(0)
            return trouble

        for turn in range(100):  # half an hour of turns of 18 s: none is a hang, none is asked
            assert await look(Beat(Phase.TURN, turn + 1), 18.0) is None
        assert not asked
        last, silent = Beat(phase, 1000), 0
        for _ in range(2 * int(HANG_S) if phase is Phase.IDLE else 0):
            assert await look(last, 1.0) is None
        assert (len(asked) > 2 * HANG_S / (PING_S + 3)) == (phase is Phase.IDLE)
        answering = False
        while (trouble := await look(last, 1.0)) is None:
            silent += 1
        assert HANG_S - PING_S - 3 < silent <= HANG_S + 2
        what = "nothing was answered" if phase is Phase.IDLE else "no step has ended"
        assert trouble == f"{what} for 300 s"
        for other in (None, Beat(Phase.OPENING, 1001)):  # a model of someone else; one that loads
            assert await look(other, 0.0) is None
        broken = await look(Beat(Phase.BROKEN, 1002), 0.0)
        assert broken == "the executor failed and could not be opened again"
        await silence.close()

    asyncio.run(watch())


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
    assert figures["serve_gone_s"] < 5
    for kind in ("whole", "streamed", "grpc"):
        assert figures["outcomes"][f"{kind} right"] and figures["outcomes"][f"{kind} error"]


CLOSED_OVER_HTTP = (
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/cudasharedmemory/region/x/register"),
    ("POST", f"/v2/models/{LLM}/trace/setting"),
    ("POST", "/v2/logging"),
    ("POST", f"/v2/repository/models/{LLM}/unload"),
)
CLOSED_OVER_GRPC: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("register_system_shared_memory", ("x", "/x", 64)),
    ("register_cuda_shared_memory", ("x", b"eA==", 0, 64)),
    ("update_trace_settings", ()),
    ("update_log_settings", ({"log_file": "/tmp/x"},)),
    ("load_model", (LLM,)),
)


def test_what_is_not_for_clients_is_closed(addresses: ServerAddresses) -> None:
    """Nothing registers memory, writes files or unloads models."""
    for method, path in CLOSED_OVER_HTTP:
        status, content, _ = fetch(addresses.http, path, {}, method)
        assert status == 403 and b"restricted" in content, (path, content)
    with grpcclient.InferenceServerClient(addresses.grpc) as client:
        for name, arguments in CLOSED_OVER_GRPC:
            with pytest.raises(InferenceServerException, match="restricted"):
                getattr(client, name)(*arguments)
    assert ask_grpc(addresses.grpc, LLM, make_fields(LLM, "host", max_tokens=2)).error is None
    first, second = restriction_options(), restriction_options()
    assert len(first) == 2 and not set(first) & set(second), "the word that opens them changes"

"""Every process of a served pair killed under load, and what clients see.

One `serve` is asked by clients over OpenAI's port (streamed or not) and gRPC all the time. Each run
kills the Triton server and each model's process in turn, and notes the memory of every process when
all is well again. Then `serve` itself is killed. A request ends right (with the text it should
have), or with one error; anything else is lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.extra import require
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.core.machine import allow_more_files
from dflash_trt.errors import DflashError
from dflash_trt.serving.client.client import GenerationRequest, ServedModel
from dflash_trt.serving.server.heartbeat import PROC, find_models, read_state

if TYPE_CHECKING:
    from aiohttp import ClientSession

PROMPT = "host"
PATIENCE_S = 120.0
_POLL_S = 0.02
# An error's client waits, so that a restart has the machine's cores.
_PAUSE_S = 0.5
_CALM_S = 2.0
_PORTS = ("grpc", "http", "metrics", "openai")


def own_memory(pid: int) -> int:
    """Bytes of a process that are in no file (its share of them), as heaps and stacks are."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss_Anon:"):
            return 1024 * int(line.split()[1])
    return 0


@contextmanager
def serve(bundle: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """Serves a bundle on free ports; gives the process, and host:port by interface."""
    ports = [part for name in _PORTS for part in (f"--{name}-port", "0")]
    command = [sys.executable, "-m", "dflash_trt", "serve", str(bundle), *ports, *options]
    pipe, silent = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdout=pipe, stderr=silent, text=True) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("ready"):
                raise DflashError("serve did not become ready")
            lines = [process.stdout.readline().split() for _ in _PORTS]
            yield process, {name: urlsplit(url).netloc for name, url, *_ in lines}
        finally:
            process.kill()


def _lives(pid: int) -> bool:
    return read_state(PROC / str(pid))[0] not in "ZX"


class Campaign:
    """A served bundle, and clients that ask in closed loops until told to stop."""

    def __init__(
        self, process: subprocess.Popen[str], hosts: dict[str, str], model: str, max_tokens: int
    ) -> None:
        self._process, self._address, self._grpc = process, hosts["OpenAI"], hosts["gRPC"]
        self._body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
        self.outcomes = Counter[str]()
        self.lost: list[str] = []
        self.longest_s = 0.0
        self.stopping = asyncio.Event()
        self._expected = ""

    def _children(self) -> dict[int, str]:
        """Command lines of `serve`'s children by process id."""
        found: dict[int, str] = {}
        for process in PROC.glob("[0-9]*"):
            state, parent = read_state(process)
            if parent == self._process.pid and state not in "ZX":
                with suppress(OSError):
                    text = (process / "cmdline").read_text("utf-8", "replace")
                    found[int(process.name)] = text.replace("\0", " ")
        return found

    def pids(self) -> dict[str, int]:
        """Process ids of `serve`, the Triton server and its models, by name."""
        children = self._children().items()
        server = next(pid for pid, text in children if "tritonserver --id" in text)
        models = {name: pid for pid, name in find_models(server).items()}
        return {"serve": self._process.pid, "server": server, **models}

    def memory(self) -> dict[str, float]:
        """MiB of each process, but for what files hold."""
        return {name: round(own_memory(pid) / 2**20, 1) for name, pid in self.pids().items()}

    async def run_clients(self, session: ClientSession, count: int) -> list[asyncio.Task[None]]:
        """Starts `count` clients, a third of them of each kind."""
        self._expected = await self._ask(session, "whole") or ""
        kinds = islice(cycle(("whole", "streamed", "grpc")), count)
        return [asyncio.create_task(self._run(session, kind)) for kind in kinds]

    async def _run(self, session: ClientSession, kind: str) -> None:
        while not self.stopping.is_set():
            began = time.monotonic()
            text: str | None = None
            lost: str | None = None
            try:
                text = await self._ask(session, kind)
                if text not in (None, self._expected):
                    lost = f"another text: {text!r}"
            except Exception as error:
                lost = repr(error)
            outcome = "error" if text is None else "right"
            if lost is not None and self.stopping.is_set():
                outcome = "cut off by the death of serve"  # nobody is there to tell it
            elif lost is not None:
                outcome = "lost"
                self.lost.append(f"{kind}: {lost:.300}")
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.outcomes[f"{kind} {outcome}"] += 1
            if outcome != "right":
                await asyncio.sleep(_PAUSE_S)

    async def _ask(self, session: ClientSession, kind: str) -> str | None:
        """The text of a request; None when it ended with one error, and any exception otherwise."""
        if kind == "grpc":
            return await self._ask_grpc()
        body = {**self._body, "stream": kind == "streamed"}
        url = f"http://{self._address}/v1/completions"
        async with session.post(url, json=body) as answer:
            content = await answer.text()
        if answer.status != 200:
            if answer.status == 503 and "error" in json.loads(content):
                return None
            raise DflashError(f"HTTP {answer.status}: {content:.200}")
        events = [event.removeprefix("data: ") for event in content.strip().split("\n\n")]
        parsed = [json.loads(event) for event in events if event != "[DONE]"]
        errors = ["error" in one for one in parsed]
        if any(errors[:-1]) or (kind == "streamed" and (events[-1] == "[DONE]") == errors[-1]):
            raise DflashError("the stream ends in its middle, or goes on after an error")
        if errors[-1]:
            return None
        return "".join(one["choices"][0]["text"] for one in parsed if one["choices"])

    async def _ask_grpc(self) -> str | None:
        model = ServedModel(self._grpc)
        request = GenerationRequest(prompt=PROMPT, max_tokens=int(str(self._body["max_tokens"])))
        try:
            async with asyncio.timeout(PATIENCE_S):
                return "".join([delta.text async for delta in model.stream(request)])
        except DflashError:
            return None
        finally:
            await model.close()

    async def strike(self, session: ClientSession, name: str) -> Figures:
        """Kills a process; seconds until health is honest, and until a request is right."""
        os.kill(self.pids()[name], signal.SIGKILL)
        struck, told_s = time.monotonic(), None
        while time.monotonic() - struck < PATIENCE_S:
            async with session.get(f"http://{self._address}/health") as health:
                is_well = health.status == 200
            if not is_well:
                told_s = told_s or round(time.monotonic() - struck, 3)
            elif told_s is not None and await self._ask(session, "whole") == self._expected:
                return {"told_s": told_s, "back_s": round(time.monotonic() - struck, 3)}
            await asyncio.sleep(_POLL_S)
        return {"told_s": told_s, "back_s": None}

    async def kill_serve(self) -> float:
        """Kills `serve`; seconds until its processes and shared memory are gone."""
        self.stopping.set()
        pids = [*self._children(), *self.pids().values()]
        arguments = self._children()[self.pids()["server"]].split()
        name = next(one for one in arguments if one.startswith("--id=")).removeprefix("--id=")
        self._process.kill()
        struck = time.monotonic()
        self._process.wait()
        while any(map(_lives, pids)) or any(Path("/dev/shm").glob(f"{name}*")):
            if time.monotonic() - struck > PATIENCE_S:
                break
            await asyncio.sleep(_POLL_S)
        return round(time.monotonic() - struck, 3)


@bench(runs=10)
def measure(work: Work, bundle: Path, *, clients: int = 32, max_tokens: int = 64) -> Figures:
    require("the kill campaign", "aiohttp")
    allow_more_files()
    name = open_bundle(bundle).manifest.name
    with serve(bundle, "--max-restarts", "1000") as served:
        return asyncio.run(_run(Campaign(*served, name, max_tokens), work.runs, clients))


async def _run(campaign: Campaign, runs: int, clients: int) -> Figures:
    import aiohttp

    blows: dict[str, list[Figures]] = {}
    memory: list[Figures] = []
    patience = aiohttp.ClientTimeout(total=PATIENCE_S)
    closed = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=patience, connector=closed) as session:
        tasks = await campaign.run_clients(session, clients)
        for _ in range(runs):
            for name in ("server", "tensorrt_llm", "ensemble"):
                await asyncio.sleep(_CALM_S)  # something is in flight
                blow = await campaign.strike(session, name)
                blows.setdefault(f"{name} SIGKILL", []).append(blow)
                click.echo(f"{name} SIGKILL: {blow}")
            await asyncio.sleep(_CALM_S)
            memory.append(campaign.memory())
            click.echo(f"MiB: {memory[-1]}")
        gone_s = await campaign.kill_serve()
        await asyncio.wait(tasks, timeout=PATIENCE_S)
    click.echo(f"serve is gone after {gone_s} s; {dict(campaign.outcomes)}; lost: {campaign.lost}")
    return {
        "blows": blows,
        "memory_mib": memory,
        "serve_gone_s": gone_s,
        "outcomes": dict(sorted(campaign.outcomes.items())),
        "lost": campaign.lost,
        "longest_request_s": round(campaign.longest_s, 3),
    }

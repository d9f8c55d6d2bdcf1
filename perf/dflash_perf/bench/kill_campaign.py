"""Every process of a served pair killed under load, and what clients see.

One `serve` is asked by clients over OpenAI's port (streamed or not) and gRPC all the time. Each run
kills the Triton server and each model's process in turn, and notes the memory of every process when
all is well again. Then `serve` itself is killed, and in each further run another one. A request
ends right (with the text it should have), or with one error; anything else is lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
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
_KINDS = ("whole", "streamed", "grpc")
_PORTS = ("grpc", "http", "metrics", "openai")


def own_memory(pid: int) -> int:
    """Bytes of a process that are in no file (its share of them), as heaps and stacks are."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss_Anon:"):
            return 1024 * int(line.split()[1])
    return 0


@dataclass(slots=True)
class ServeProcess:
    """`dflash-trt serve`, and where it answers."""

    process: subprocess.Popen[str]
    urls: dict[str, str]

    @property
    def address(self) -> str:
        """Of the OpenAI port."""
        return urlsplit(self.urls["OpenAI"]).netloc

    def children(self) -> dict[int, str]:
        """Command lines of its children by process id."""
        found: dict[int, str] = {}
        for process in PROC.iterdir():
            if process.name.isdecimal():
                state, parent = read_state(process)
                if parent == self.process.pid and state not in "ZX":
                    with suppress(OSError):
                        text = (process / "cmdline").read_text("utf-8", "replace")
                        found[int(process.name)] = text.replace("\0", " ")
        return found

    def server(self) -> int:
        return next(pid for pid, text in self.children().items() if "tritonserver --id" in text)

    def find(self, name: str) -> int:
        """The process id of the `server`, or of a model."""
        if name == "server":
            return self.server()
        return next(pid for pid, model in find_models(self.server()).items() if model == name)

    def memory(self) -> dict[str, float]:
        """MiB of each process, but for what files hold."""
        pids = {"serve": self.process.pid, "server": self.server()}
        pids |= {name: pid for pid, name in find_models(self.server()).items()}
        return {name: round(own_memory(pid) / 2**20, 1) for name, pid in pids.items()}


@contextmanager
def serving(bundle: Path, *arguments: str) -> Iterator[ServeProcess]:
    """Serves the bundle on free ports."""
    ports = [part for name in _PORTS for part in (f"--{name}-port", "0")]
    command = [sys.executable, "-m", "dflash_trt", "serve", str(bundle), *ports, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("ready"):
                raise DflashError("serve did not become ready")
            urls = dict(process.stdout.readline().split()[:2] for _ in _PORTS)
            yield ServeProcess(process, urls)
        finally:
            process.kill()


@dataclass
class Clients:
    """Clients that ask in closed loops until told to stop; outcomes by kind of client."""

    serve: ServeProcess
    model: str
    max_tokens: int
    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    expected: str = ""
    is_stopping: bool = False

    async def health(self) -> int:
        """The HTTP status of /health."""
        url = f"http://{self.serve.address}/health"
        async with _open_session() as session, session.get(url) as answer:
            return answer.status

    async def ask(self, kind: str) -> str | None:
        """The text of a request; None when it ended with one error.

        Raises:
            Exception: it ended in any other way, or not at all.
        """
        if kind == "grpc":
            return await self._ask_grpc()
        body = {"model": self.model, "prompt": PROMPT, "max_tokens": self.max_tokens}
        body |= {"temperature": 0, "stream": kind == "streamed"}
        url = f"http://{self.serve.address}/v1/completions"
        async with _open_session() as session, session.post(url, json=body) as answer:
            return _read_answer(answer.status, await answer.read(), streamed=kind == "streamed")

    async def _ask_grpc(self) -> str | None:
        model = ServedModel(urlsplit(self.serve.urls["gRPC"]).netloc)
        request = GenerationRequest(prompt=PROMPT, max_tokens=self.max_tokens)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return "".join([delta.text async for delta in model.stream(request)])
        except DflashError:
            return None
        finally:
            await model.close()

    @asynccontextmanager
    async def running(self, count: int) -> AsyncIterator[None]:
        """`count` clients, a third of them of each kind."""
        self.expected = await self.ask("whole") or ""
        tasks = [asyncio.create_task(self._run(kind)) for kind in islice(cycle(_KINDS), count)]
        try:
            yield
        finally:
            self.is_stopping = True
            await asyncio.wait(tasks, timeout=PATIENCE_S)

    async def _run(self, kind: str) -> None:
        while not self.is_stopping:
            began, what = time.monotonic(), None
            try:
                text = await self.ask(kind)
            except Exception as error:
                text, what = None, repr(error)
            if not self._record(kind, began, text, what):
                await asyncio.sleep(_PAUSE_S)

    def _record(self, kind: str, began: float, text: str | None, what: str | None) -> bool:
        """Counts a request; whether it was answered right. `what` is how it was lost."""
        if text not in (None, self.expected):
            what = f"another text: {text!r:.200}"
        outcome = "right" if text == self.expected else "error"
        if what is not None and self.is_stopping:
            outcome = "cut off by the death of serve"  # nobody is there to tell it
        elif what is not None:
            outcome = "lost"
            self.lost.append(f"{kind}: {what:.300}")
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        self.outcomes[f"{kind} {outcome}"] += 1
        return outcome == "right"


def _open_session() -> ClientSession:
    import aiohttp

    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S))


def _read_answer(status: int, content: bytes, *, streamed: bool) -> str | None:
    if status != 200:
        if status == 503 and content.count(b'"error"') == 1 and "error" in json.loads(content):
            return None
        raise DflashError(f"HTTP {status}: {content[:200]!r}")
    if not streamed:
        text: str = json.loads(content)["choices"][0]["text"]
        return text
    events = content.decode().removesuffix("\n\n").split("\n\n")
    *pieces, last = [event.removeprefix("data: ") for event in events]
    parsed: list[Any] = [json.loads(piece) for piece in pieces]
    if any("error" in one for one in parsed):
        raise DflashError("something follows an error")
    if last != "[DONE]":
        if "error" not in json.loads(last):
            raise DflashError("the stream ends in its middle")
        return None
    return "".join(one["choices"][0]["text"] for one in parsed if one["choices"])


async def strike(clients: Clients, name: str) -> Figures:
    """Kills a process; seconds until health is honest, and until a request is answered right."""
    os.kill(clients.serve.find(name), signal.SIGKILL)
    struck = time.monotonic()
    told_s: float | None = None
    while time.monotonic() - struck < PATIENCE_S:
        if await clients.health() != 200:
            told_s = told_s or time.monotonic() - struck
        elif told_s is not None and await clients.ask("whole") == clients.expected:
            return {"told_s": round(told_s, 3), "back_s": round(time.monotonic() - struck, 3)}
        await asyncio.sleep(_POLL_S)
    return {"told_s": told_s, "back_s": None}


async def kill_serve(serve: ServeProcess) -> float:
    """SIGKILL to `serve`; seconds until its processes, ports and shared memory are gone."""
    server = serve.server()
    pids = [*serve.children(), *find_models(server)]
    name = next(one for one in serve.children()[server].split() if one.startswith("--id="))[5:]
    os.kill(serve.process.pid, signal.SIGKILL)
    struck = time.monotonic()
    serve.process.wait()
    while time.monotonic() - struck < PATIENCE_S:
        alive = any(read_state(PROC / str(pid))[0] not in "ZX" for pid in pids)
        left = any(Path("/dev/shm").glob(f"{name}*"))
        if not alive and not left and all(map(_is_free, serve.urls.values())):
            break
        await asyncio.sleep(_POLL_S)
    return round(time.monotonic() - struck, 3)


def _is_free(url: str) -> bool:
    address = urlsplit(url)
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((address.hostname, address.port))
            bound.listen()
        except OSError:
            return False
    return True


@bench(runs=10)
def measure(
    work: Work,
    bundle: Path,
    *,
    clients: int = 32,
    max_tokens: int = 64,
) -> Figures:
    require("the kill campaign", "aiohttp")
    allow_more_files()
    manifest = open_bundle(bundle).manifest
    return asyncio.run(_campaign(bundle, manifest.name, work.runs, clients, max_tokens))


async def _campaign(bundle: Path, name: str, runs: int, clients: int, max_tokens: int) -> Figures:
    blows: dict[str, list[Figures]] = {}
    memory: list[Figures] = []
    loads: list[Clients] = []
    gone = []
    for serve_number in range(runs):
        with serving(bundle, "--max-restarts", "1000") as serve:
            load = Clients(serve, name, max_tokens)
            loads.append(load)
            async with load.running(clients):
                for _ in range(0 if serve_number else runs):
                    await _strike_all(load, blows)
                    await asyncio.sleep(_CALM_S)
                    memory.append(serve.memory())
                    click.echo(f"MiB: {memory[-1]}")
                load.is_stopping = True
                gone.append(await kill_serve(serve))
                click.echo(f"serve SIGKILL: all is gone after {gone[-1]} s")
    lost = [one for load in loads for one in load.lost]
    outcomes = sum((load.outcomes for load in loads), Counter[str]())
    click.echo(f"{dict(outcomes)}; lost: {lost[:5]}")
    return {
        "pair": name,
        "blows": blows,
        "memory_mib": memory,
        "serve_gone_s": gone,
        "outcomes": dict(sorted(outcomes.items())),
        "lost": lost,
        "longest_request_s": round(max(load.longest_s for load in loads), 3),
    }


async def _strike_all(load: Clients, blows: dict[str, list[Figures]]) -> None:
    """Kills each process of the server in turn."""
    for name in ("server", "tensorrt_llm", "ensemble"):
        await asyncio.sleep(_CALM_S)  # something is in flight
        blow = await strike(load, name)
        blows.setdefault(f"{name} SIGKILL", []).append(blow)
        click.echo(f"{name} SIGKILL: {blow}")

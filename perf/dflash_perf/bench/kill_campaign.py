"""Every process of a served pair killed and stopped under load, and what clients see.

One `serve` is asked by clients over OpenAI's port (streamed or not) and gRPC all the time. Each run
kills the Triton server and each model's process in turn, the first ones stop them too, and notes
the memory of every process when all is well again. Then `serve` itself is killed, and in each
further run another one. A request ends right (with the text it should have), or with one error;
anything else is lost.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.core.machine import allow_more_files
from dflash_trt.errors import DflashError
from dflash_trt.serving.client.client import GenerationRequest, ServedModel
from dflash_trt.serving.server.processes import PROC, find_models, read_state

PROMPT = "host"
PATIENCE_S = 120.0
_POLL_S = 0.02
# An error's client waits, so that a restart has the machine's cores.
_PAUSE_S = 0.5
_CALM_S = 2.0
_KINDS = ("whole", "streamed")
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
                state, parent = read_state(process) or ("X", 0)
                if parent == self.process.pid and state not in "ZX":
                    with suppress(OSError):
                        text = (process / "cmdline").read_text("utf-8", "replace")
                        found[int(process.name)] = text.replace("\0", " ")
        return found

    def server(self) -> int:
        return next(pid for pid, text in self.children().items() if "tritonserver --id" in text)

    def find(self, name: str) -> int:
        """The process id of the `server`, the `guard`, or of a model."""
        if name == "server":
            return self.server()
        if name == "guard":
            return next(pid for pid, text in self.children().items() if "guard.py" in text)
        return next(pid for pid, model in find_models(self.server()).items() if model == name)

    def memory(self) -> dict[str, float]:
        """MiB of each process, but for what files hold."""
        pids = {"serve": self.process.pid, "server": self.server()}
        pids |= {name: pid for pid, name in find_models(self.server()).items()}
        return {name: round(own_memory(pid) / 2**20, 1) for name, pid in pids.items()}

    def health(self) -> int:
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        finally:
            connection.close()


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
    stopping: threading.Event = field(default_factory=threading.Event)

    def ask(self, kind: str) -> str | None:
        """The text of a request over OpenAI's port; None when it ended with one error.

        Raises:
            Exception: it ended in any other way, or not at all.
        """
        body = {"model": self.model, "prompt": PROMPT, "max_tokens": self.max_tokens}
        body |= {"temperature": 0, "stream": kind == "streamed"}
        connection = http.client.HTTPConnection(self.serve.address, timeout=PATIENCE_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            with connection.getresponse() as answer:
                return _read_answer(answer.status, answer.read(), streamed=kind == "streamed")
        finally:
            connection.close()

    async def ask_grpc(self) -> str | None:
        """Likewise over gRPC."""
        model = ServedModel(urlsplit(self.serve.urls["gRPC"]).netloc)
        text = ""
        try:
            async with asyncio.timeout(PATIENCE_S):
                request = GenerationRequest(prompt=PROMPT, max_tokens=self.max_tokens)
                async for delta in model.stream(request):
                    text += delta.text
        except DflashError:
            return None
        finally:
            await model.close()
        return text

    @contextmanager
    def running(self, count: int) -> Iterator[None]:
        """`count` clients, a third of them in each of three ways."""
        self.expected = self.ask("whole") or ""
        over_grpc, over_http = count // 3, count - count // 3
        threads = [
            threading.Thread(target=self._run, args=[_KINDS[number % 2]], daemon=True)
            for number in range(over_http)
        ]
        # All calls of gRPC's asynchronous client belong to one loop.
        threads.append(threading.Thread(target=asyncio.run, args=[self._run_grpc(over_grpc)]))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.stopping.set()
            for thread in threads:
                thread.join(PATIENCE_S)

    def _run(self, kind: str) -> None:
        while not self.stopping.is_set():
            began, what = time.monotonic(), None
            try:
                text = self.ask(kind)
            except Exception as error:
                text, what = None, repr(error)
            if not self._record(kind, began, text, what):
                self.stopping.wait(_PAUSE_S)

    async def _run_grpc(self, count: int) -> None:
        async def run() -> None:
            while not self.stopping.is_set():
                began, what = time.monotonic(), None
                try:
                    text = await self.ask_grpc()
                except Exception as error:
                    text, what = None, repr(error)
                if not self._record("grpc", began, text, what):
                    await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(run() for _ in range(count)))

    def _record(self, kind: str, began: float, text: str | None, what: str | None) -> bool:
        """Counts a request; whether it was answered right. `what` is how it was lost."""
        if text not in (None, self.expected):
            what = f"another text: {text!r:.200}"
        outcome = "right" if text == self.expected else "error"
        if what is not None and self.stopping.is_set():
            outcome = "cut off by the death of serve"  # nobody is there to tell it
        elif what is not None:
            outcome = "lost"
            self.lost.append(f"{kind}: {what:.300}")
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        self.outcomes[f"{kind} {outcome}"] += 1
        return outcome == "right"


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


def strike(serve: ServeProcess, clients: Clients, name: str, number: signal.Signals) -> Figures:
    """Sends the signal; seconds until health is honest, and until a request is answered right."""
    os.kill(serve.find(name), number)
    struck = time.monotonic()
    told_s: float | None = None
    while time.monotonic() - struck < PATIENCE_S:
        if serve.health() != 200:
            told_s = told_s or time.monotonic() - struck
        elif told_s is not None and clients.ask("whole") == clients.expected:
            return {"told_s": round(told_s, 3), "back_s": round(time.monotonic() - struck, 3)}
        time.sleep(_POLL_S)
    return {"told_s": told_s, "back_s": None}


def kill_serve(serve: ServeProcess) -> float:
    """SIGKILL to `serve`; seconds until its processes, ports and shared memory are gone."""
    server = serve.server()
    pids = [*serve.children(), *find_models(server)]
    name = next(one for one in serve.children()[server].split() if one.startswith("--id="))[5:]
    os.kill(serve.process.pid, signal.SIGKILL)
    struck = time.monotonic()
    serve.process.wait()
    while time.monotonic() - struck < PATIENCE_S:
        alive = any((read_state(PROC / str(pid)) or ("X", 0))[0] not in "ZX" for pid in pids)
        left = any(Path("/dev/shm").glob(f"{name}*"))
        if not alive and not left and all(map(_is_free, serve.urls.values())):
            break
        time.sleep(_POLL_S)
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
    stops: Annotated[int, "Runs that stop processes too."] = 3,
    max_tokens: int = 64,
) -> Figures:
    allow_more_files()
    manifest = open_bundle(bundle).manifest
    blows: dict[str, list[Figures]] = {}
    memory: list[Figures] = []
    loads: list[Clients] = []
    gone = []
    for serve_number in range(work.runs):
        with serving(bundle, "--max-restarts", "1000") as serve:
            load = Clients(serve, manifest.name, max_tokens)
            loads.append(load)
            with load.running(clients):
                for run in range(0 if serve_number else work.runs):
                    _strike_all(serve, load, blows, stop=run < stops)
                    time.sleep(_CALM_S)
                    memory.append(serve.memory())
                    click.echo(f"MiB: {memory[-1]}")
                os.kill(serve.find("guard"), signal.SIGKILL)  # which another replaces
                time.sleep(1.0)
                load.stopping.set()
                gone.append(kill_serve(serve))
                click.echo(f"serve SIGKILL: all is gone after {gone[-1]} s")
    lost = [one for load in loads for one in load.lost]
    outcomes = sum((load.outcomes for load in loads), Counter[str]())
    click.echo(f"{dict(outcomes)}; lost: {lost[:5]}")
    return {
        "pair": manifest.name,
        "blows": blows,
        "memory_mib": memory,
        "serve_gone_s": gone,
        "outcomes": dict(sorted(outcomes.items())),
        "lost": lost,
        "longest_request_s": round(max(load.longest_s for load in loads), 3),
    }


def _strike_all(
    serve: ServeProcess, load: Clients, blows: dict[str, list[Figures]], *, stop: bool
) -> None:
    """Kills each process of the server in turn; stops each, too."""
    for name in ("server", "tensorrt_llm", "ensemble"):
        for number in (signal.SIGKILL, signal.SIGSTOP) if stop else (signal.SIGKILL,):
            time.sleep(_CALM_S)  # something is in flight
            blow = strike(serve, load, name, number)
            blows.setdefault(f"{name} {number.name}", []).append(blow)
            click.echo(f"{name} {number.name}: {blow}")

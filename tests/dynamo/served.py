"""`serve --dynamo` in the environment that has Dynamo's packages, and questions to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-dynamo" / "bin" / "python"
INSTALLED = ROOT / ".venv-dynamo" / ".installed"
WORKERS = 2


@dataclass
class Answer:
    """What came back: its status, its tokens, and the whole body."""

    status: int
    body: dict[str, Any]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.body["nvext"]["completion_token_ids"])

    @property
    def usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = self.body["usage"]
        return usage


@dataclass
class Dynamo:
    """A frontend with its workers; `events` are the lines that `serve` wrote on stderr."""

    process: subprocess.Popen[str]
    address: str
    metrics: list[str]
    events: list[str] = field(default_factory=list)
    _pids: dict[int, int] = field(default_factory=dict)
    _ids: frozenset[object] = frozenset()

    def ask(self, prompt: Sequence[int] | str, **options: Any) -> Answer:
        with self._post(prompt, options) as reply:
            return Answer(reply.status, json.loads(reply.read()))

    def stream(self, prompt: Sequence[int] | str, **options: Any) -> Iterator[dict[str, Any]]:
        """The chunks of an answer, as they come; a closed one is a client that left."""
        more = {"stream": True, "stream_options": {"include_usage": True}}
        with self._post(prompt, options | more) as reply:
            assert reply.status == 200, reply.read()
            for line in iter(reply.readline, b""):
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    @contextmanager
    def _post(
        self, prompt: Sequence[int] | str, options: dict[str, Any]
    ) -> Iterator[http.client.HTTPResponse]:
        extra = {"extra_fields": ["completion_token_ids", "engine_data", "worker_id"]}
        body = {"model": "demo", "prompt": prompt, "temperature": 0, "nvext": extra} | options
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            yield connection.getresponse()
        finally:
            connection.close()

    def worker_pids(self) -> dict[int, int]:
        """Of the workers that run, by their place, which is that of their figures."""
        ports = [urlsplit(url).port for url in self.metrics]
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_text().split("\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent != self.process.pid or "dynamo-worker" not in words:
                    continue
                lines = (entry / "environ").read_text().split("\0")
            except OSError:
                continue
            (port,) = (one for one in lines if one.startswith("DYN_SYSTEM_PORT="))
            found[ports.index(int(port.partition("=")[2]))] = int(entry.name)
        return found

    def end_busy(self, how: signal.Signals = signal.SIGKILL, least: int = 1) -> int:
        """Sends a signal to a worker whose own figure shows so many requests; returns its pid."""
        found: list[int] = []

        def look() -> bool:
            found[:] = [one for one in self._pids if self.active(one) >= least]
            return bool(found)

        wait_until(look, "a worker at work")
        victim = self._pids[found[0]]
        os.kill(victim, how)
        return victim

    def active(self, worker: int) -> float:
        """Slots of a worker that hold a request."""
        return self.figure(worker, r"dflash_active_slots\{.*\}")

    def count_restarts(self) -> int:
        return sum("another is started" in one for one in self.events)

    def figure(self, worker: int, name: str) -> float:
        """The sum of a worker's figure over its labels."""
        with urlopen(self.metrics[worker], timeout=PATIENCE_S) as reply:
            text = reply.read().decode()
        values = re.findall(rf"^{name} (\S+)$", re.sub(r"\{(.*?)\} ", r"{\1} ", text), re.MULTILINE)
        return sum(map(float, values))

    def wait_whole(self) -> None:
        """Returns when every worker is ready, and the frontend has them and no other.

        Files name a worker that was killed for some seconds more: as many instances must be new
        as processes are.
        """
        wait_until(self._is_whole, "a frontend with all workers")

    def _is_whole(self) -> bool:
        try:
            for url in self.metrics:
                urlopen(url.replace("/metrics", "/health"), timeout=PATIENCE_S).close()
            with urlopen(f"http://{self.address}/health", timeout=PATIENCE_S) as reply:
                found = json.load(reply)["instances"]
        except (OSError, http.client.HTTPException):
            return False
        pids = self.worker_pids()
        ids = frozenset(one["instance_id"] for one in found if one["endpoint"] == "generate")
        new = len(set(pids.values()) - set(self._pids.values()))
        if not len(pids) == len(ids) == WORKERS or len(ids - self._ids) != new:
            return False
        self._pids, self._ids = pids, ids
        return True


@contextmanager
def serving(bundle: Path, *arguments: str) -> Iterator[Dynamo]:
    """Two workers of `bundle` behind a frontend; all of them are told to end at the end."""
    paths = (ROOT / "tests" / "dynamo" / "hanging", ROOT, ROOT / "perf", ROOT / "plugins")
    process = subprocess.Popen(
        [PYTHON, "-m", "dflash_trt", "serve", bundle, "--dynamo", str(WORKERS)]
        + ["--openai-port", "0", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    events: list[str] = []
    lines: list[str] = []

    def listen(stream: IO[str] | None, to: list[str]) -> None:
        assert stream is not None
        for line in stream:
            to.append(line)

    with ThreadPoolExecutor(2) as pool:
        try:
            pool.submit(listen, process.stderr, events)
            pool.submit(listen, process.stdout, lines)
            wait_until(
                lambda: len(lines) >= 3 + WORKERS or process.poll() is not None, "a frontend"
            )
            assert process.poll() is None and lines[0].startswith("ready after "), events
            address = lines[1].split()[1].split("/")[2]
            yield Dynamo(process, address, [one.split()[2] for one in lines[3:]], events)
        finally:
            # Killed at once it would leave its folders; its workers end with it in any case.
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

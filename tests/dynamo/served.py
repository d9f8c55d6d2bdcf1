"""`serve --dynamo` in the environment that has Dynamo's packages, and questions to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
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

    def ask(self, prompt: Sequence[int] | str, **options: Any) -> Answer:
        extra = {"extra_fields": ["completion_token_ids", "engine_data", "worker_id"]}
        body = {"model": "demo", "prompt": prompt, "temperature": 0, "nvext": extra} | options
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            reply = connection.getresponse()
            return Answer(reply.status, json.loads(reply.read()))
        finally:
            connection.close()

    def worker_pids(self) -> list[int]:
        """Of the workers that run, in the order of their start."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_text().split("\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == self.process.pid and "dynamo-worker" in words:
                found.append(int(entry.name))
        return sorted(found)

    def figure(self, worker: int, name: str) -> float:
        """The sum of a worker's figure over its labels."""
        with urlopen(self.metrics[worker], timeout=PATIENCE_S) as reply:
            text = reply.read().decode()
        values = re.findall(rf"^{name} (\S+)$", re.sub(r"\{(.*?)\} ", r"{\1} ", text), re.MULTILINE)
        return sum(map(float, values))

    def wait_whole(self) -> None:
        """Returns when every worker is ready, and the frontend has them.

        It may have one more: files still name a worker that was killed.
        """
        wait_until(self._is_whole, "a frontend with all workers")

    def _is_whole(self) -> bool:
        try:
            for url in self.metrics:
                urlopen(url.replace("/metrics", "/health"), timeout=PATIENCE_S).close()
            with urlopen(f"http://{self.address}/health", timeout=PATIENCE_S) as reply:
                found = json.load(reply)["instances"]
        except OSError:
            return False
        return sum(one["endpoint"] == "generate" for one in found) >= WORKERS


@contextmanager
def serving(bundle: Path, *arguments: str) -> Iterator[Dynamo]:
    """Two workers of `bundle` behind a frontend; all of them are killed at the end."""
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

    def listen() -> None:
        assert process.stderr is not None
        events.extend(iter(process.stderr.readline, ""))

    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("ready after "), (first, events)
        lines = [process.stdout.readline().split() for _ in range(2 + WORKERS)]
        address = lines[0][1].split("/")[2]
        yield Dynamo(process, address, [line[2] for line in lines[2:]], events)
    finally:
        process.kill()
        process.wait()
        listening.join(PATIENCE_S)

"""A pair served by `dflash-trt serve` as users start it, and the same pair in this process."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dflash_trt.cli.main import main
from dflash_trt.decoding import SamplingParams
from dflash_trt.models.build_config import data_folder
from dflash_trt.serving.server.launcher import ServerOptions
from dflash_trt.serving.server.repository import RepositoryOptions, write_repository
from dflash_trt.text.prompts import read_prompts
from tests.pairs import SilentProgress
from tests.waiting import PATIENCE_S

SLOTS = 8
QUEUE = 8
LONG_CONTEXT = 1 << 14
SERVER_PORTS = ["--grpc-port", "0", "--http-port", "0", "--metrics-port", "0"]  # any free ones
FREE_PORTS = [*SERVER_PORTS, "--openai-port", "0"]
PROMPTS = read_prompts(data_folder("demo_pair") / "prompts.jsonl")[:16]
GREEDY = SamplingParams()
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=0.7, top_p=0.9, seed=11),
    SamplingParams(temperature=1.3, top_k=5, seed=2**64 - 1),
)


@dataclass(frozen=True)
class Served:
    """Where a served bundle answers: URLs, of the metrics host and port; `serve`'s process."""

    pid: int
    bundle: Path
    grpc: str
    metrics: str
    openai: str

    @property
    def address(self) -> str:
        """Of gRPC, as clients other than ours write it."""
        return self.grpc.removeprefix("grpc://")


def package(bundle: Path, folder: Path, **options: Any) -> Path:
    """Writes a model repository of `bundle` to `folder`; `options` are RepositoryOptions'."""
    write_repository(bundle, folder, RepositoryOptions(**options), SilentProgress())
    return folder


def build_demo(folder: Path, changes: dict[str, dict[str, Any]], *arguments: str) -> Path:
    """A bundle of the demo pair with `changes` to JSON files of it, by role/name."""
    options = ["--target", "demo", *arguments, "-o", str(folder / "bundle")]
    for role in ("target", "draft"):
        shutil.copytree(data_folder("demo_pair") / role, folder / role)
        options += [f"--{role}-checkpoint", str(folder / role)]
    for file, changed in changes.items():
        config = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(config | changed))
    assert main(["build", *options]) == 0
    return folder / "bundle"


def server_options(repository: Path, **options: Any) -> ServerOptions:
    """For a server on free ports."""
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    return ServerOptions(repository=repository, **(ports | options))


def fetch(
    address: str, path: str, body: Any = None, method: str = "POST"
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """Status, content and headers of what a host and port answer; a body of bytes goes as it is."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    connection.request(method, path, data, {"Content-Type": "application/json"})
    with connection.getresponse() as answer:
        return answer.status, answer.read(), answer.headers


@contextmanager
def starting(
    *arguments: object, run: tuple[str, ...] = ("dflash_trt",)
) -> Iterator[subprocess.Popen[str]]:
    """Runs `serve` with these arguments; it is killed at the end where it has not ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", *run, "serve", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_ready(process: subprocess.Popen[str], lines: int = 4) -> dict[str, str]:
    """The URLs that it prints, in so many lines, once it is ready."""
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith("ready after "), (first, process.communicate())
    return dict(process.stdout.readline().split()[:2] for _ in range(lines))


@contextmanager
def serving(source: Path, bundle: Path, *arguments: str) -> Iterator[Served]:
    """`serve` on `source`, a bundle or a repository of it; SIGTERM must end it well."""
    with starting(source, *FREE_PORTS, *arguments) as process:
        urls = wait_ready(process)
        metrics = urlsplit(urls["metrics"]).netloc
        yield Served(process.pid, bundle, urls["gRPC"], metrics, urls["OpenAI"])
        process.terminate()
        assert process.wait(PATIENCE_S) == 0

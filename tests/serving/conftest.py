"""What the tests need that start a real Triton server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dflash_trt
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.cli.main import main
from dflash_trt.runtime import RequestResult
from dflash_trt.serving.server.launcher import ServerAddresses, ServerOptions, TritonServer
from dflash_trt.serving.server.repository import RepositoryOptions, write_repository
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from dflash_trt.text.prompts import read_prompts
from tests.pairs import SilentProgress
from tests.serving.client import read_metrics
from tests.serving.served import (
    QUEUE,
    Local,
    Served,
    build_chat_demo,
    build_long_demo,
    serving,
)
from tests.waiting import PATIENCE_S

Generate = Callable[..., RequestResult]


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The demo pair."""
    folder = tmp_path_factory.mktemp("serving") / "demo-bundle"
    assert main(["build", "--target", "demo", "-o", str(folder)]) == 0
    return open_bundle(folder)


@pytest.fixture(scope="session")
def prompts(bundle: Bundle) -> list[str]:
    assert bundle.prompts is not None
    return read_prompts(bundle.prompts)


def start_server(repository: Path) -> TritonServer:
    """A server on free ports, not ready yet; it does not wait long for what a test left behind."""
    return TritonServer(
        ServerOptions(
            repository=repository, http_port=0, grpc_port=0, metrics_port=0, exit_timeout_s=2
        )
    )


@pytest.fixture(scope="session")
def repository(bundle: Bundle) -> Path:
    folder = bundle.folder.parent / "repository"
    write_repository(bundle.folder, folder, RepositoryOptions(), SilentProgress())
    return folder


@pytest.fixture(scope="session")
def long_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair with a context that takes it half a minute and more to fill."""
    return build_long_demo(tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="session")
def long_repository(long_bundle: Path) -> Path:
    folder = long_bundle.parent / "repository"
    write_repository(long_bundle, folder, RepositoryOptions(), SilentProgress())
    return folder


@pytest.fixture(scope="session")
def long_addresses(
    tritonserver: TritonServerBinary, long_repository: Path
) -> Iterator[ServerAddresses]:
    """A server whose requests go on while a test, however slow, has something to do."""
    with start_server(long_repository) as running:
        running.wait_ready(PATIENCE_S)
        yield running.addresses


@pytest.fixture(scope="session")
def server(tritonserver: TritonServerBinary, repository: Path) -> Iterator[TritonServer]:
    """One server for all tests that leave it as it was."""
    with start_server(repository) as running:
        running.wait_ready(PATIENCE_S)
        yield running
        if running.exit_code is None:
            wait_idle(running.addresses)


@pytest.fixture
def addresses(server: TritonServer) -> ServerAddresses:
    assert server.exit_code is None
    return server.addresses


@pytest.fixture(scope="session")
def generate(bundle: Bundle) -> Iterator[Generate]:
    """What `dflash-trt generate` does with a prompt, in this process."""
    with dflash_trt.load(bundle.folder) as pair:

        def call(prompt: str, **fields: object) -> RequestResult:
            return pair.generate([prompt], **fields)[0]  # type: ignore[arg-type]

        yield call


def wait_idle(addresses: ServerAddresses | Served, ended: float | None = None) -> dict[str, float]:
    """Waits until no slot is held and nothing waits; the metrics then.

    `ended` is the number of requests that must have ended, since the server's start. Without it
    the figures must have stayed as they are for a while: gauges are a tenth of a second old, and
    a request is counted a little after its client has the answer.
    """
    deadline = time.monotonic() + PATIENCE_S
    before: dict[str, float] | None = None
    while True:
        metrics = read_metrics(addresses.metrics)
        busy = metrics["dflash_active_slots"] + metrics["dflash_waiting_requests"]
        settled = metrics == before if ended is None else count_ended(metrics) >= ended
        if settled and busy == metrics["dflash_cached_tokens"] == 0:
            return metrics
        assert time.monotonic() < deadline, metrics
        before = metrics
        time.sleep(0.5 if ended is None else 0.05)


def count_ended(metrics: dict[str, float]) -> float:
    """Requests that have ended, whatever the outcome."""
    return sum(value for name, value in metrics.items() if name.startswith("dflash_requests"))


@pytest.fixture(scope="session")
def chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair with a chat template."""
    return build_chat_demo(tmp_path_factory.mktemp("chat-demo"))


@pytest.fixture(scope="session")
def local(chat_bundle: Path) -> Local:
    """`chat_bundle` in this process."""
    return Local(chat_bundle)


@pytest.fixture(scope="session")
def served(
    tritonserver: TritonServerBinary, chat_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """`chat_bundle` packaged with a short queue, and served with the OpenAI front."""
    repository = tmp_path_factory.mktemp("served") / "repository"
    arguments = [str(chat_bundle), "-o", str(repository), "--max-queue-size", str(QUEUE)]
    assert main(["package", *arguments]) == 0
    with serving(repository, chat_bundle) as running:
        yield running

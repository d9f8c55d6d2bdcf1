"""What the tests need that start a real Triton server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dflash_trt
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.cli.main import main
from dflash_trt.decoding import RequestResult, SamplingParams
from dflash_trt.pair import Prompt
from dflash_trt.serving.server.launcher import ServerAddresses, TritonServer
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.cli.conftest import run  # noqa: F401
from tests.inspection import server_traces
from tests.serving.served import (
    LONG_CONTEXT,
    QUEUE,
    Served,
    build_demo,
    package,
    read_metrics,
    server_options,
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
def long_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair with a context that takes it half a minute and more to fill."""
    changed = {"max_position_embeddings": LONG_CONTEXT}
    configs = {"target/config.json": changed, "draft/config.json": changed}
    folder = tmp_path_factory.mktemp("long")
    return build_demo(folder, configs, "--max-seq-len", str(LONG_CONTEXT))


@pytest.fixture(scope="session")
def chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair with a chat template."""
    template = "{% for m in messages %}{{ eos_token }}{{ m.content }}{% endfor %}"
    configs = {"target/tokenizer_config.json": {"chat_template": template}}
    return build_demo(tmp_path_factory.mktemp("chat"), configs)


@pytest.fixture(scope="session")
def repository(bundle: Bundle) -> Path:
    """Of blocks that do not change: what a test counts is what `generate` counts."""
    return package(bundle.folder, bundle.folder.parent / "repository", block_schedule="none")


@pytest.fixture(scope="session")
def long_repository(long_bundle: Path) -> Path:
    """With a queue of two requests beside the eight slots."""
    return package(long_bundle, long_bundle.parent / "repository", max_queue_size=2)


@pytest.fixture(scope="session")
def long_addresses(
    tritonserver: TritonServerBinary, long_repository: Path
) -> Iterator[ServerAddresses]:
    """A server whose requests go on while a test, however slow, has something to do.

    At its end it waits briefly, and leaves nothing behind.
    """
    with TritonServer(server_options(long_repository, exit_timeout_s=2)) as server:
        server.wait_ready(PATIENCE_S)
        traces = server_traces(server)
        yield server.addresses
    assert len(traces) > 1 and not any(path.exists() for path in traces)


@pytest.fixture
def addresses(served: Served) -> ServerAddresses:
    return ServerAddresses(http=served.http, grpc=served.address, metrics=served.metrics)


@pytest.fixture(scope="session")
def served(
    tritonserver: TritonServerBinary, chat_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """`chat_bundle` with a short queue and blocks that do not change, behind the OpenAI front."""
    repository = tmp_path_factory.mktemp("served") / "repository"
    options = {"max_queue_size": QUEUE, "block_schedule": "none"}
    with serving(package(chat_bundle, repository, **options), chat_bundle) as running:
        yield running


@pytest.fixture(scope="session")
def generate(chat_bundle: Path) -> Iterator[Generate]:
    """What the demo pair answers in this process, which served answers must equal."""
    with dflash_trt.load(chat_bundle, block_schedule="none") as pair:

        def call(
            prompt: Prompt, sampling: SamplingParams | None = None, **options: object
        ) -> RequestResult:
            return pair.generate([prompt], sampling, **options)[0]  # type: ignore[arg-type]

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
    return sum(value for name, value in metrics.items() if name.startswith("dflash_requests_total"))


@contextmanager
def counting(addresses: ServerAddresses | Served, ended: int) -> Iterator[dict[str, float]]:
    """By how much each figure grows while `ended` requests end; known after the block."""
    grown: dict[str, float] = {}
    before = wait_idle(addresses)
    yield grown
    after = wait_idle(addresses, count_ended(before) + ended)
    grown.update({name: value - before.get(name, 0) for name, value in after.items()})

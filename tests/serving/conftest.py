"""What the tests need that start a real Triton server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import dflash_trt
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.cli.main import main
from dflash_trt.decoding import RequestResult, SamplingParams
from dflash_trt.pair import Prompt
from dflash_trt.serving.server.launcher import ServerAddresses
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.cli.conftest import run  # noqa: F401
from tests.serving.served import (
    LONG_CONTEXT,
    QUEUE,
    Served,
    build_demo,
    package,
    read_metrics,
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
def repository(bundle: Bundle) -> Path:
    """Of blocks that do not change: what a test counts is what `generate` counts."""
    return package(bundle.folder, bundle.folder.parent / "repository", block_schedule="none")


@pytest.fixture(scope="session")
def served(
    tritonserver: TritonServerBinary, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The demo pair with a chat template and a context that takes it half a minute to fill.

    It has a short queue, blocks that do not change, and the OpenAI front.
    """
    template = "{% for m in messages %}{{ eos_token }}{{ m.content }}{% endfor %}"
    long = {"max_position_embeddings": LONG_CONTEXT}
    configs: dict[str, dict[str, Any]] = {
        "target/tokenizer_config.json": {"chat_template": template},
        "target/config.json": long,
        "draft/config.json": long,
    }
    folder = tmp_path_factory.mktemp("served")
    bundle = build_demo(folder, configs, "--max-seq-len", str(LONG_CONTEXT))
    options = {"max_queue_size": QUEUE, "block_schedule": "none"}
    with serving(package(bundle, folder / "repository", **options), bundle) as running:
        yield running


@pytest.fixture
def addresses(served: Served) -> ServerAddresses:
    return ServerAddresses(http=served.http, grpc=served.address, metrics=served.metrics)


@pytest.fixture(scope="session")
def generate(served: Served) -> Iterator[Generate]:
    """What the demo pair answers in this process, which served answers must equal."""
    with dflash_trt.load(served.bundle, block_schedule="none") as pair:

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

"""What the harness measures of a server whose times are known, up to 256 streams."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from dflash_perf.harness.config import SweepConfig
from dflash_perf.harness.points import RunSummary
from dflash_perf.harness.store import ResultStore
from dflash_perf.harness.sweep import run_sweep

from tests.perf.conftest import Stub

OSL = 31


class Silent:
    """A sweep's observer that shows nothing."""

    def plan(self, runs: int, finished: int) -> None: ...

    def start(self, *details: object) -> None: ...

    def finish(self, summary: RunSummary) -> None: ...


@pytest.mark.parametrize(
    ("model", "streams", "requests"),
    [("timed", 1, 3), ("timed", 16, 32), pytest.param("timed_many", 256, 512)],
)
def test_within_two_percent_of_the_truth(
    stub: Stub, prompts: Path, tmp_path: Path, model: str, streams: int, requests: int
) -> None:
    """Several tokens a message; the truth is when the server took and sent each, by its own log."""
    config = SweepConfig.model_validate(
        {
            "configurations": [{"name": model, "model": model, "url": stub.grpc}],
            "input_file": str(prompts),
            "osl": OSL,
            "concurrency": [streams],
            "request_count": requests,
            "repeats": 1,
            "warmup": 0,
        }
    )
    store: ResultStore = run_sweep(config, tmp_path / "results", Silent(), "")
    (run,) = store.runs()
    (point,) = store.points()
    truth = [stub.truth(model)[seed] for seed in range(requests)]
    ttft = [one["first_at"] - one["came_at"] for one in truth]
    tpot = [(one["last_at"] - one["first_at"]) / (one["tokens"] - 1) for one in truth]
    window = max(one["last_at"] for one in truth) - min(one["came_at"] for one in truth)
    assert run.completed == requests
    assert run.distributions["output_tokens"]["min"] == OSL
    assert run.distributions["ttft"]["p50"] == pytest.approx(statistics.median(ttft), rel=0.02)
    assert point.interactivity == pytest.approx(1 / statistics.median(tpot), rel=0.02)
    assert run.values["output_throughput"] == pytest.approx(requests * OSL / window, rel=0.02)
    assert run.values["acceptance_length"] == pytest.approx(30 / 8)
    print(f"{streams} streams: client CPU share {run.values['client_cpu_share']:.2f}")

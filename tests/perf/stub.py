"""A stub server of known timing in a process of its own, and one sweep against it.

It writes down when each request came and when its first and last output went out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dflash_perf.harness.config import SweepConfig
from dflash_perf.harness.sweep import SweepObserver, run_sweep

CHECKOUT = Path(__file__).parents[2]
STUB = "tests.standins.served_model"
OSL = 31


@dataclass(frozen=True)
class Stub:
    """Where the stub server listens, and the file of the times that it recorded."""

    grpc: str
    http: str
    log: Path

    def truth(self, model: str) -> dict[int, dict[str, Any]]:
        """The recorded times of a model's latest answer, by seed."""
        lines = map(json.loads, self.log.read_text().splitlines())
        return {line["seed"]: line for line in lines if line["model"] == model}


@contextmanager
def run_stub(log: Path) -> Iterator[Stub]:
    """The stub server, which ends when its standard input is closed."""
    command = [sys.executable, "-m", STUB, str(log)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=CHECKOUT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        ports = json.loads(process.stdout.readline())
        yield Stub(f"127.0.0.1:{ports['grpc']}", f"http://127.0.0.1:{ports['http']}", log)


def write_prompts(path: Path) -> Path:
    """Seven short prompts."""
    path.write_text("".join(json.dumps({"prompt": f"number {n}"}) + "\n" for n in range(7)))
    return path


def measure_once(
    stub: Stub, prompts: Path, folder: Path, model: str, streams: int, requests: int
) -> dict[str, float]:
    """Sweeps the stub's `model` into `folder`; the relative errors of four figures.

    Counts are asserted: they are exact on any machine.
    """
    settings = {
        "configurations": [{"name": model, "model": model, "url": stub.grpc}],
        "input_file": str(prompts),
        "concurrency": [streams],
        "repeats": 1,
        "osl": OSL,
        "request_count": requests,
        "warmup": 0,
    }
    store = run_sweep(SweepConfig.model_validate(settings), folder, SweepObserver(), "")
    (run,) = store.runs()
    (point,) = store.points()
    truth = [stub.truth(model)[seed] for seed in range(requests)]
    ttft = [one["first_at"] - one["came_at"] for one in truth]
    tpot = [(one["last_at"] - one["first_at"]) / (one["tokens"] - 1) for one in truth]
    window = max(one["last_at"] for one in truth) - min(one["came_at"] for one in truth)
    assert run.completed == requests
    assert run.distributions["output_tokens"]["min"] == OSL
    assert abs(run.values["acceptance_length"] - 30 / 8) < 1e-9
    assert point.interactivity is not None
    return {
        "TTFT": run.distributions["ttft"]["p50"] / median(ttft) - 1,
        "TPOT": run.distributions["tpot"]["p50"] / median(tpot) - 1,
        "interactivity": point.interactivity * median(tpot) - 1,
        "throughput": run.values["output_throughput"] * window / (requests * OSL) - 1,
    }

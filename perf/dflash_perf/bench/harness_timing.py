"""How far the harness is from a server of known timing.

The stub server of the tests writes down when each request came and when its first and last output
went out; a sweep measures the same requests from outside. Runs in a checkout, where the tests are.
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

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.repeat import show, spread, spreads
from dflash_perf.bench.served import sweep_once
from dflash_trt.errors import DflashError

CHECKOUT = Path(__file__).parents[3]
STUB = "tests.standins.served_model"
OSL = 31
# (model of the stub, streams); every message of these models has several tokens.
CASES = (("timed", 1), ("timed", 4), ("timed", 16), ("timed_many", 64), ("timed_many", 256))


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
    """The stub server in a process of its own, which ends when its standard input is closed.

    Raises:
        DflashError: this is not a clone of the repository, so the stub is missing.
    """
    if not CHECKOUT.joinpath(*STUB.split(".")).with_suffix(".py").is_file():
        raise DflashError(f"{STUB} is not here", fix="run it from a clone of the project")
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
) -> tuple[dict[str, float], float]:
    """Sweeps the stub's `model` with `requests` requests over `streams` streams, into `folder`.

    Returns the relative errors of four figures, and the client's CPU share. Counts are asserted:
    they are exact on any machine.
    """
    served = {"name": model, "model": model, "url": stub.grpc}
    load = {"osl": OSL, "request_count": requests, "warmup": 0}
    store = sweep_once(folder, served, prompts, streams, **load)
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
    errors = {
        "TTFT": run.distributions["ttft"]["p50"] / median(ttft) - 1,
        "TPOT": run.distributions["tpot"]["p50"] / median(tpot) - 1,
        "interactivity": point.interactivity * median(tpot) - 1,
        "throughput": run.values["output_throughput"] * window / (requests * OSL) - 1,
    }
    return errors, run.values["client_cpu_share"]


@bench(runs=5)
def measure(work: Work) -> Figures:
    cases: list[Figures] = []
    prompts = write_prompts(work.folder / "prompts.jsonl")
    with run_stub(work.folder / "truth.jsonl") as stub:
        for model, streams in CASES:
            folders = [work.folder / f"{streams}-{number}" for number in range(work.runs)]
            requests = max(4, 2 * streams)
            runs = [measure_once(stub, prompts, one, model, streams, requests) for one in folders]
            errors = spreads([found for found, _ in runs], *runs[0][0])
            share = spread([share for _, share in runs])
            cases.append({"streams": streams, "errors": errors, "client_cpu_share": share})
            shown = ", ".join(f"{name} {show(one, '+.2%')}" for name, one in errors.items())
            click.echo(f"{streams} streams: {shown}; client CPU share {share['median']:.0%}")
    return {"cases": cases}

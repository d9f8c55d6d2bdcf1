"""How far the harness is from a server of known timing.

    python -m tests.perf.timing --output perf/results

The stub server writes down when each request came and when its first and last output went out;
a sweep measures the same requests from outside.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
from dflash_perf.harness.config import SweepConfig
from dflash_perf.harness.sweep import SilentObserver, run_sweep
from dflash_perf.record import spread, write_record

from tests.perf.conftest import Stub, start_stub, stop_stub

OSL = 31
# model of the stub, streams: several tokens a message in all of them.
CASES = (("timed", 1), ("timed", 4), ("timed", 16), ("timed_many", 64), ("timed_many", 256))


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: relative errors of the four figures, and the client's own share of a core."""

    errors: dict[str, float]
    client_cpu_share: float


def measure(
    stub: Stub, prompts: Path, folder: Path, model: str, streams: int, requests: int
) -> Measured:
    """Sweeps `requests` requests of the stub's `model` with so many streams, into `folder`.

    Counts are asserted, since they are exact whatever the machine does.
    """
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
    store = run_sweep(config, folder, SilentObserver(), "")
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
        "TTFT": run.distributions["ttft"]["p50"] / statistics.median(ttft) - 1,
        "TPOT": run.distributions["tpot"]["p50"] / statistics.median(tpot) - 1,
        "interactivity": point.interactivity * statistics.median(tpot) - 1,
        "throughput": run.values["output_throughput"] * window / (requests * OSL) - 1,
    }
    return Measured(errors, run.values["client_cpu_share"])


@click.command()
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Folder of records.")
def main(repeats: int, output: Path | None) -> None:
    """Measure the harness at 1 … 256 streams, and record how far it is from the truth."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"number {n}"}) + "\n" for n in range(7)))
        process, stub = start_stub(folder / "truth.jsonl")
        try:
            for model, streams in CASES:
                runs = [
                    measure(
                        stub,
                        prompts,
                        folder / f"{streams}-{n}",
                        model,
                        streams,
                        max(4, 2 * streams),
                    )
                    for n in range(repeats)
                ]
                errors = {
                    name: spread([run.errors[name] for run in runs]) for name in runs[0].errors
                }
                share = spread([run.client_cpu_share for run in runs])
                rows.append({"streams": streams, "errors": errors, "client_cpu_share": share})
                shown = ", ".join(
                    f"{name} {one['median']:+.2%} ({one['min']:+.2%} … {one['max']:+.2%})"
                    for name, one in errors.items()
                )
                click.echo(f"{streams} streams: {shown}; client CPU share {share['median']:.0%}")
        finally:
            stop_stub(process)
    if output is not None:
        click.echo(write_record(output, "harness-timing", "tests.perf.timing", {"cases": rows}))


if __name__ == "__main__":
    main()

"""What paged KV caches cost a step on the CPU, and what a shared prefix saves.

    python -m dflash_perf.paged_cost --output perf/results

The demo pair's shape with random weights, linear and paged in turn: a verify of 8 rows and a plain
step at several numbers of tokens held, then the time to the first token of a prompt whose prefix
the engine has seen, against one that it has not.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np

from dflash_perf.record import spread, write_record
from dflash_perf.step_cost import SHAPE, open_synthetic, time_steps
from dflash_perf.synthetic import write_pair
from dflash_trt.bundle.pages import Paging
from dflash_trt.executors.base import Executor
from dflash_trt.runtime import Engine, Request

POSITIONS = 4096
HELD = (100, 1000, 3000)
PREFIX, QUESTION = 2048, 32


def measure_steps(folder: Path, runs: int, seconds: float) -> dict[str, Any]:
    """Milliseconds per step of either layout, by tokens held and by graph."""
    figures: dict[str, Any] = {}
    for held in HELD:
        executors = {
            "linear": open_synthetic(folder, POSITIONS, held),
            "paged": open_synthetic(folder, POSITIONS, held, Paging()),
        }
        for name, speculative in (("target_only", False), ("dflash", True)):
            times: dict[str, list[float]] = {layout: [] for layout in executors}
            for _ in range(runs):
                for layout, executor in executors.items():
                    times[layout].append(
                        time_steps(executor, speculative=speculative, seconds=seconds, held=held)
                    )
            ratios = [b / a for a, b in zip(times["linear"], times["paged"], strict=True)]
            figures[f"{name} at {held} tokens"] = {
                "ms_per_step": {layout: spread(each) for layout, each in times.items()},
                "ratio_paged_to_linear": spread(ratios),
            }
            click.echo(
                f"{name} at {held} tokens: linear {min(times['linear']):.2f} ms, paged "
                f"{min(times['paged']):.2f} ms, ratio {spread(ratios)['median']:.2f}"
            )
        for executor in executors.values():
            executor.close()
    return figures


def measure_first_token(executor: Executor, runs: int) -> dict[str, Any]:
    """Milliseconds to the first token after a prompt that is new, and after one begun before."""
    engine = Engine(executor)
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {"new": [], "shared": []}
    for _ in range(runs):
        prefix = rng.integers(0, SHAPE.vocab, PREFIX).tolist()
        for name in times:
            question = rng.integers(0, SHAPE.vocab, QUESTION).tolist()
            request = Request(prompt_ids=(*prefix, *question), max_tokens=1)
            statistics = engine.generate([request])[0].statistics
            assert statistics.cached_prompt_tokens == (PREFIX if name == "shared" else 0)
            times[name].append((statistics.time_to_first_token_s or 0.0) * 1e3)
    click.echo(
        f"first token after {PREFIX} + {QUESTION} tokens: {min(times['new']):.1f} ms, with the "
        f"first {PREFIX} on shared pages {min(times['shared']):.1f} ms"
    )
    return {name: spread(each) for name, each in times.items()}


@click.command()
@click.option("--runs", type=click.IntRange(1), default=9, show_default=True)
@click.option("--seconds", type=float, default=0.5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Folder to record the run in.")
def main(runs: int, seconds: float, output: Path | None) -> None:
    """Compare paged with linear caches, and shared with new prefixes."""
    with tempfile.TemporaryDirectory() as folder:
        write_pair(Path(folder), SHAPE, dtype="F32", random=True)
        steps = measure_steps(Path(folder), runs, seconds)
        executor = open_synthetic(Path(folder), POSITIONS, 1, Paging())
        first_token = measure_first_token(executor, runs)
        executor.close()
    if output is not None:
        record = {
            "page_size": Paging().page_size,
            "steps": steps,
            "prefix_tokens": PREFIX,
            "question_tokens": QUESTION,
            "ms_to_first_token": first_token,
        }
        click.echo(write_record(output, "paged-cost", "dflash_perf.paged_cost", record))


if __name__ == "__main__":
    main()

"""What a step costs when the cache could be long but is not.

    python -m dflash_perf.step_cost --output perf/results

The demo pair's shape with random weights, built for 512 and for 4096 positions; 100 tokens
held; a verify of 8 rows and a plain step of each in turn.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from dflash_perf.record import spread, write_record
from dflash_perf.synthetic import Shape, write_pair
from dflash_trt.bundle.build import BuildOptions, build_bundle
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.bundle.pages import Paging
from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.pair import check_pair
from dflash_trt.checkpoints.target import read_target
from dflash_trt.commands.progress import StageBars
from dflash_trt.config import BuildConfig, CheckpointSource
from dflash_trt.executors import open_executor
from dflash_trt.executors.base import Executor, Scores, hold_positions

HELD = 100
LENGTHS = (512, 4096)
SHAPE = Shape(
    layers=32,
    hidden=64,
    heads=2,
    kv_heads=1,
    head_dim=32,
    intermediate=192,
    vocab=512,
    draft_layers=2,
    taps=(1, 8, 15, 22, 29),
    block_size=8,
    max_positions=max(LENGTHS),
)


def open_synthetic(
    folder: Path, max_seq_len: int, held: int = HELD, paging: Paging | None = None
) -> Executor:
    """Builds and opens the synthetic pair for `max_seq_len` positions, `held` tokens cached."""
    pair = check_pair(read_target(folder / "target"), read_draft(folder / "draft"))
    config = BuildConfig(
        description="synthetic",
        target=CheckpointSource(checkpoint="target"),
        draft=CheckpointSource(checkpoint="draft"),
        max_seq_len=max_seq_len,
        max_batch=8,
    )
    bundle = folder / f"bundle-{max_seq_len}{'' if paging is None else '-paged'}"
    with StageBars() as bars:
        options = BuildOptions(paging=paging, overwrite=True)
        build_bundle(pair, config, "synthetic", bundle, options, bars)
    executor = open_executor(open_bundle(bundle), threads=1)
    hold_positions(executor, 0, max_seq_len)
    ids = np.arange(held, dtype=np.int64)[None] % SHAPE.vocab
    zero, last = np.zeros(1, np.int64), np.array([[held - 1]])
    executor.forward("target", 0, ids, zero, last, Scores.NONE)
    executor.forward("target_only", 0, ids, zero, last, Scores.NONE)
    return executor


def time_steps(executor: Executor, *, speculative: bool, seconds: float, held: int = HELD) -> float:
    """Milliseconds per step at `held` tokens, averaged over `seconds`."""
    start = np.array([held])
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        if speculative:
            executor.speculate(0, np.array([7]), start, SHAPE.block_size, Scores.NONE)
        else:
            token, row = np.array([[7]]), np.zeros((1, 1), np.int64)
            executor.forward("target_only", 0, token, start, row, Scores.NONE)
        count += 1
    return (time.perf_counter() - started) / count * 1e3


@click.command()
@click.option("--runs", type=click.IntRange(1), default=9, show_default=True)
@click.option("--seconds", type=float, default=0.5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Folder to record the run in.")
def main(runs: int, seconds: float, output: Path | None) -> None:
    """Compare step times for caches of 512 and 4096 positions with 100 tokens held."""
    with tempfile.TemporaryDirectory() as folder:
        write_pair(Path(folder), SHAPE, dtype="F32", random=True)
        executors = {length: open_synthetic(Path(folder), length) for length in LENGTHS}
        figures: dict[str, Any] = {}
        for name, speculative in (("target_only", False), ("dflash", True)):
            times: dict[int, list[float]] = {length: [] for length in LENGTHS}
            for _ in range(runs):
                for length, executor in executors.items():
                    step = time_steps(executor, speculative=speculative, seconds=seconds)
                    times[length].append(step)
            short, long = (times[length] for length in LENGTHS)
            ratios = [b / a for a, b in zip(short, long, strict=True)]
            figures[name] = {
                "ms_per_step": {str(length): spread(times[length]) for length in LENGTHS},
                "ratio_4096_to_512": spread(ratios),
            }
            middle = figures[name]["ratio_4096_to_512"]
            click.echo(
                f"{name}: {min(short):.2f} ms at 512, {min(long):.2f} ms at 4096, ratio "
                f"{middle['median']:.2f} ({middle['min']:.2f} … {middle['max']:.2f})"
            )
    if output is not None:
        record = {"tokens_held": HELD, "by_graph": figures}
        click.echo(write_record(output, "step-cost", "dflash_perf.step_cost", record))


if __name__ == "__main__":
    main()

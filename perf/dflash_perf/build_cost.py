"""What building costs: time and peak memory for a checkpoint far larger than that memory.

    python -m dflash_perf.build_cost --output perf/results
    python -m dflash_perf.build_cost --executor tensorrt-rtx --runs 1 --output perf/results

For the CPU the weights are holes in sparse files of the true sizes, so the benchmark takes no
disk; a build never reads them, which is what the peak memory shows. Engines hold the weights, and
equal ones only once, so for them the weights are random. Their peak memory counts the mapped
weight files too, which the system can drop.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from dflash_perf.record import spread, write_record
from dflash_perf.synthetic import Shape, write_pair

SHAPE_2GB = Shape(
    layers=18,
    hidden=2048,
    heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate=6144,
    vocab=32_000,
    draft_layers=5,
    taps=(1, 5, 9, 12, 15),
    block_size=16,
    max_positions=8192,
)
CONFIG = """\
description: synthetic
target: {checkpoint: target}
draft: {checkpoint: draft}
max_seq_len: 8192
"""


def build_once(folder: Path, number: int, executor: str) -> tuple[float, float]:
    """Runs `dflash-trt build` in a process of its own; seconds and peak memory in GiB."""
    command = [sys.executable, "-m", "dflash_trt", "build", "--target", str(folder / "pair.yaml")]
    command += ["--executor", executor, "-o", str(folder / f"bundle-{number}")]
    started = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise click.ClickException(f"the build failed with exit code {process.returncode}")
    return time.perf_counter() - started, usage.ru_maxrss / 2**20


@click.command()
@click.option(
    "--executor",
    type=click.Choice(["cpu", "tensorrt-rtx"]),
    default="cpu",
    show_default=True,
    help="What to build for.",
)
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Folder to record the run in.")
def main(executor: str, runs: int, output: Path | None) -> None:
    """Measure time and peak memory of building a synthetic pair of about 2 GB."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_pair(folder, SHAPE_2GB, dtype="BF16", random=executor != "cpu")
        (folder / "pair.yaml").write_text(CONFIG, encoding="utf-8")
        measured = [build_once(folder, number, executor) for number in range(runs)]
        engines = {
            engine.stem: engine.stat().st_size
            for engine in folder.glob("bundle-0/engines/*/*.engine")
        }
    seconds, memory = (spread(list(values)) for values in zip(*measured, strict=True))
    click.echo(
        f"{size / 1e9:.2f} GB of weights: {seconds['median']:.2f} s "
        f"({seconds['min']:.2f} … {seconds['max']:.2f}), peak {memory['max']:.2f} GiB"
    )
    if output is not None:
        record = {
            "executor": executor,
            "weight_bytes": size,
            "seconds": seconds,
            "peak_memory_gib": memory,
            "engine_bytes": engines,
        }
        name = "build-cost" if executor == "cpu" else f"build-cost-{executor}"
        click.echo(write_record(output, name, "dflash_perf.build_cost", record))


if __name__ == "__main__":
    main()

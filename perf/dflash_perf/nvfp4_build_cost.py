"""What an NVFP4 pair of Qwen3-8B's shapes costs to build: time, memory, engine sizes.

    python -m dflash_perf.nvfp4_build_cost --output perf/results
    python -m dflash_perf.nvfp4_build_cost --layers 4          # a first look, extrapolated

Every shape is that of Qwen3-8B and its DFlash draft (hidden 4096, 36 and 5 layers, vocabulary
151,936, untied); the layers' linears are random NVFP4, embedding, output head and `fc` random
bfloat16. Needs about 25 GB of disk. `peak_resident` counts mapped weight files, which the system
can drop; `peak_anonymous` does not. A build above --limit of anonymous memory is stopped.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import click

from dflash_perf.record import write_record
from dflash_perf.synthetic import Shape, write_pair

QWEN3_8B = Shape(
    layers=36,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=12_288,
    vocab=151_936,
    draft_layers=5,
    taps=(1, 9, 17, 25, 33),
    block_size=16,
    max_positions=40_960,
)
CONFIG = """\
description: synthetic
target: {checkpoint: target}
draft: {checkpoint: draft}
max_batch: 8
max_seq_len: 4096
"""
GIB = 2**30


@dataclass(slots=True)
class Cost:
    """A build's seconds and peak memory in bytes; `stopped` where it went past the limit."""

    seconds: float = 0.0
    peak_resident: int = 0
    peak_anonymous: int = 0
    stopped: bool = False


def measure(command: list[str], limit: int) -> Cost:
    """Runs `command`, watching its memory; kills it above `limit` bytes of anonymous memory."""
    cost = Cost()
    started = time.perf_counter()
    process = subprocess.Popen(command)
    while process.poll() is None:
        resident, anonymous = _memory(process.pid)
        cost.peak_resident = max(cost.peak_resident, resident)
        cost.peak_anonymous = max(cost.peak_anonymous, anonymous)
        if anonymous > limit:
            process.kill()
            cost.stopped = True
        time.sleep(0.1)
    cost.seconds = time.perf_counter() - started
    if process.returncode and not cost.stopped:
        raise click.ClickException(f"the build failed with exit code {process.returncode}")
    return cost


def _memory(pid: int) -> tuple[int, int]:
    """Resident and resident anonymous bytes of a process; zeros once it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    resident, anonymous = (
        1024 * int(fields.get(name, "0 kB").split()[0]) for name in ("VmRSS", "RssAnon")
    )
    return resident, anonymous


def _figures(cost: Cost) -> dict[str, object]:
    return {
        "seconds": round(cost.seconds, 1),
        "peak_resident_gib": round(cost.peak_resident / GIB, 2),
        "peak_anonymous_gib": round(cost.peak_anonymous / GIB, 2),
        "stopped_at_the_limit": cost.stopped,
    }


@click.command()
@click.option("--layers", type=click.IntRange(2, 36), default=36, show_default=True)
@click.option("--limit", type=float, default=19.0, show_default=True, help="GiB of memory.")
@click.option("--arch", default="sm_120", show_default=True)
@click.option("--scratch", type=click.Path(path_type=Path), help="Folder with the disk for it.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder to record the run in.")
def main(layers: int, limit: float, arch: str, scratch: Path | None, output: Path | None) -> None:
    """Measure building the graphs, then the engines, of a synthetic NVFP4 Qwen3-8B pair."""
    taps = tuple(min(tap, layers - 1) for tap in QWEN3_8B.taps)
    shape = replace(QWEN3_8B, layers=layers, taps=taps)
    record: dict[str, object] = {"layers": layers, "arch": arch, "compute_dtype": "bfloat16"}
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        size = write_pair(folder, shape, dtype="BF16", random=True, is_nvfp4=True)
        record["weight_bytes"] = size
        click.echo(f"{layers} layers, {size / 1e9:.2f} GB of weights")
        (folder / "pair.yaml").write_text(CONFIG, encoding="utf-8")
        build = [sys.executable, "-m", "dflash_trt", "build", "--target"]
        build += [str(folder / "pair.yaml"), "-o"]
        for executor in ("cpu", "tensorrt-rtx"):
            bundle = folder / executor
            command = [*build, str(bundle), "--executor", executor]
            if executor != "cpu":
                command += ["--arch", arch, "--precision", "bf16"]
            cost = measure(command, int(limit * GIB))
            figures = _figures(cost)
            engines = {one.stem: one.stat().st_size for one in bundle.glob("engines/*/*.engine")}
            if engines:
                figures["engine_bytes"] = engines
            record[executor] = figures
            click.echo(f"{executor}: {figures}")
    if output is not None:
        click.echo(write_record(output, "nvfp4-build-cost", "dflash_perf.nvfp4_build_cost", record))


if __name__ == "__main__":
    main()

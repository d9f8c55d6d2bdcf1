"""What quantising costs: time, speed and peak memory for a checkpoint far larger than that memory.

    python -m dflash_perf.quantize_cost --output perf/results

The weights are random; input magnitudes are given, so calibration is not part of it. Each run
reads every linear twice (its range, then its codes), measures each one's error, writes the new
checkpoint to the same disk and waits until it is there (fsync). CPU seconds are those of the
process, start and imports included. `core_mb_per_s` is the arithmetic alone: MB of bf16 weights
that turn into codes in a second of one core.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np

from dflash_perf.record import spread, write_record
from dflash_perf.synthetic import Shape, write_pair
from dflash_trt.quantization.formats import Float32
from dflash_trt.quantization.fp8 import fp8_scale, quantize_fp8
from dflash_trt.quantization.linears import Algorithm
from dflash_trt.quantization.nvfp4 import nvfp4_global_scale, quantize_nvfp4
from dflash_trt.quantization.rows import CHUNK_ELEMENTS

SHAPE_1GB = Shape(
    layers=9,
    hidden=2048,
    heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate=6144,
    vocab=32_000,
    draft_layers=1,
    taps=(1,),
    block_size=16,
    max_positions=8192,
)
_BYTES = 2  # of a bf16 weight
# Run in a process of its own, so that its peak memory is that of quantising alone.
_RUN = """
import sys
from pathlib import Path
from dflash_trt.checkpoints.target import read_target
from dflash_trt.quantization.checkpoint import quantize_checkpoint
from dflash_trt.quantization.linears import Algorithm, QuantizeOptions
from dflash_trt.quantization.scales import Activations

class Silent:
    def stage(self, name, total, unit="bytes"): pass
    def advance(self, count): pass

spec = read_target(sys.argv[1])
amax = {role: 8.0 for role in spec.weights}
options = QuantizeOptions(Algorithm(sys.argv[3]))
quantize_checkpoint(spec, options, Activations.known(amax), Path(sys.argv[2]), Silent())
# Not getrusage: its peak includes what the parent held when it forked.
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""


def quantize_once(source: Path, output: Path, algorithm: Algorithm) -> tuple[float, float, float]:
    """Quantises `source` in a process of its own; seconds, CPU seconds and peak memory in MiB."""
    command = [sys.executable, "-c", _RUN, str(source), str(output), algorithm.value]
    started, cpu = time.perf_counter(), _children_cpu_seconds()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise click.ClickException(f"quantising failed with exit code {done.returncode}")
    return seconds, _children_cpu_seconds() - cpu, int(done.stdout) / 2**10


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def core_speed(algorithm: Algorithm, seconds: float = 1.0) -> float:
    """MB of bf16 weights that a second of one core turns into codes, chunk by chunk."""
    rows: Float32 = np.random.default_rng(0).standard_normal((CHUNK_ELEMENTS // 2048, 2048), "f4")
    amax = float(np.abs(rows).max())
    chunks = 0
    started = time.process_time()  # the numbers stay true on a busy machine
    while (elapsed := time.process_time() - started) < seconds:
        if algorithm is Algorithm.FP8:
            quantize_fp8(rows, fp8_scale(amax))
        else:
            quantize_nvfp4(rows, nvfp4_global_scale(amax))
        chunks += 1
    return chunks * rows.size * _BYTES / elapsed / 1e6


@click.command()
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Folder to record the run in.")
def main(runs: int, output: Path | None) -> None:
    """Measure time, speed and peak memory of quantising a synthetic target of about 1 GB."""
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pair(folder, SHAPE_1GB, dtype="BF16", random=True)
        size = (folder / "target" / "model.safetensors").stat().st_size
        for algorithm in Algorithm:
            measured = []
            for _ in range(runs):
                measured.append(quantize_once(folder / "target", folder / "out", algorithm))
                written = sum(path.stat().st_size for path in (folder / "out").iterdir())
                shutil.rmtree(folder / "out")
            seconds, cpu, memory = (spread(list(v)) for v in zip(*measured, strict=True))
            speed = core_speed(algorithm)
            click.echo(
                f"{algorithm}: {size / 1e9:.2f} GB to {written / 1e9:.2f} GB in "
                f"{seconds['median']:.2f} s ({seconds['min']:.2f} … {seconds['max']:.2f}), "
                f"{cpu['median']:.2f} s of CPU; peak {memory['max']:.0f} MiB; "
                f"arithmetic {speed:,.0f} MB/s a core"
            )
            figures[algorithm.value] = {
                "bytes": written,
                "seconds": seconds,
                "gb_per_s": size / 1e9 / seconds["median"],
                "cpu_seconds": cpu,
                "peak_memory_mib": memory,
                "core_mb_per_s": speed,
            }
    if output is not None:
        record = {"weight_bytes": size, **figures}
        click.echo(write_record(output, "quantize-cost", "dflash_perf.quantize_cost", record))


if __name__ == "__main__":
    main()

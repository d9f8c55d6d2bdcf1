"""What quantising costs: time, speed and peak memory for a checkpoint far larger than that memory.

The weights are random; input magnitudes are given, so calibration is not part of it. Each run
reads every linear twice (its range, then its codes), measures each one's error, writes the new
checkpoint to the same disk and waits until it is there (fsync). CPU seconds are those of the
process, start and imports included. `core_mb_per_s` is the arithmetic alone: MB of bf16 weights
that turn into codes in a second of one core.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import click
import numpy as np

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.build_cost import SIZES, TWO_GB
from dflash_perf.bench.process import peak_memory
from dflash_perf.bench.repeat import show, spreads
from dflash_trt.checkpoints.target import read_target
from dflash_trt.core.formats import QUANTIZED, Format
from dflash_trt.core.progress import SilentProgress
from dflash_trt.quantization.checkpoint import quantize_checkpoint
from dflash_trt.quantization.codecs import (
    Float32,
    fp8_scale,
    nvfp4_global_scale,
    quantize_fp8,
    quantize_nvfp4,
)
from dflash_trt.quantization.linears import QuantizeOptions
from dflash_trt.quantization.scales import Activations
from dflash_trt.quantization.tensors import CHUNK_ELEMENTS
from dflash_trt.synthetic.qwen3 import resize, write_pair

HALF = replace(SIZES, layers=SIZES.layers[:9])
ONE_GB = resize(TWO_GB, HALF, draft_layers=1, block_size=TWO_GB.draft.block_size)
_BYTES = 2  # of a bf16 weight


def quantize(source: Path, output: Path, algorithm: Format) -> dict[str, float]:
    """Quantises a checkpoint with given input magnitudes; returns the cost of this process."""
    spec = read_target(source)
    known = Activations.known(dict.fromkeys(spec.weights, 8.0))
    quantize_checkpoint(spec, QuantizeOptions(algorithm), known, output, SilentProgress())
    return {
        "cpu_seconds": time.process_time(),
        "peak_memory_mib": peak_memory() / 2**20,
        "bytes": sum(path.stat().st_size for path in output.iterdir()),
    }


def quantize_apart(work: Work, source: Path, algorithm: Format) -> list[dict[str, float]]:
    """Quantises in a new process per run; `seconds` include its start and imports."""
    output = work.folder / "quantized"
    found: list[dict[str, float]] = []
    for _ in range(work.runs):
        started = time.perf_counter()
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            figures = process.submit(quantize, source, output, algorithm).result()
        found.append({"seconds": time.perf_counter() - started, **figures})
        shutil.rmtree(output)
    return found


def core_speed(algorithm: Format, seconds: float = 1.0) -> float:
    """MB of bf16 weights that one core quantises per second, chunk by chunk."""
    rows: Float32 = np.random.default_rng(0).standard_normal((CHUNK_ELEMENTS // 2048, 2048), "f4")
    amax = float(np.abs(rows).max())
    chunks = 0
    started = time.process_time()  # CPU time, so that other processes do not change the result
    while (elapsed := time.process_time() - started) < seconds:
        if algorithm is Format.FP8:
            quantize_fp8(rows, fp8_scale(amax))
        else:
            quantize_nvfp4(rows, nvfp4_global_scale(amax))
        chunks += 1
    return chunks * rows.size * _BYTES / elapsed / 1e6


@bench(runs=3)
def measure(work: Work) -> Figures:
    write_pair(work.folder, ONE_GB, dtype="BF16", random=True)
    source = work.folder / "target"
    size = (source / "model.safetensors").stat().st_size
    figures: Figures = {"weight_bytes": size}
    for algorithm in QUANTIZED:
        measured = quantize_apart(work, source, algorithm)
        found = spreads(measured, "seconds", "cpu_seconds", "peak_memory_mib")
        written, speed = measured[-1]["bytes"], core_speed(algorithm)
        click.echo(
            f"{algorithm}: {size / 1e9:.2f} GB to {written / 1e9:.2f} GB in "
            f"{show(found['seconds'], '.2f')} s, "
            f"{found['cpu_seconds']['median']:.2f} s of CPU; "
            f"peak {found['peak_memory_mib']['max']:.0f} MiB; "
            f"arithmetic {speed:,.0f} MB/s a core"
        )
        figures[algorithm.value] = {
            "bytes": written,
            **found,
            "gb_per_s": size / 1e9 / found["seconds"]["median"],
            "core_mb_per_s": speed,
        }
    return figures

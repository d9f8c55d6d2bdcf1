"""What an NVFP4 pair of Qwen3-8B's shapes costs to build: time, memory, engine sizes.

Every shape is that of Qwen3-8B and its DFlash draft, untied; the layers' linears are random NVFP4,
embedding, output head and `fc` random bfloat16. Needs about 25 GB of disk; with fewer --layers it
is a first look. `peak_resident` counts mapped weight files, which the system can drop;
`peak_anonymous` does not. A build above --limit of anonymous memory is stopped.
"""

from __future__ import annotations

from typing import Annotated

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.process import BuildCost, build_synthetic, engine_bytes
from dflash_perf.synthetic.qwen3 import resize, write_pair
from dflash_trt.planning.known_pairs import find_pair

QWEN3_8B = find_pair("qwen3-8b")
GIB = 2**30


@bench()
def measure(
    work: Work,
    *,
    layers: Annotated[int, click.IntRange(2, 36)] = 36,
    limit: Annotated[float, "GiB of memory."] = 19.0,
    arch: str = "sm_120",
) -> Figures:
    pair = resize(QWEN3_8B, layers=layers, draft_layers=len(QWEN3_8B.draft.model.sizes.layers))
    size = write_pair(work.folder, pair, dtype="BF16", random=True, is_nvfp4=True)
    click.echo(f"{layers} layers, {size / 1e9:.2f} GB of weights")
    figures: Figures = {
        "layers": layers,
        "arch": arch,
        "compute_dtype": "bfloat16",
        "weight_bytes": size,
    }
    engine_options = ("--arch", arch, "--precision", "bf16")
    for executor, options in (("cpu", ()), ("tensorrt-rtx", engine_options)):
        options = ("--executor", executor, "--max-seq-len", "4096", *options)
        bundle = work.folder / executor
        cost = build_synthetic(work.folder, bundle, *options, limit=limit * GIB)
        figures[executor] = _figures(cost)
        if engines := engine_bytes(bundle):
            figures[executor]["engine_bytes"] = engines
        click.echo(f"{executor}: {figures[executor]}")
    return figures


def _figures(cost: BuildCost) -> Figures:
    return {
        "seconds": round(cost.seconds, 1),
        "peak_resident_gib": round(cost.peak_resident / GIB, 2),
        "peak_anonymous_gib": round(cost.peak_anonymous / GIB, 2),
        "stopped_at_the_limit": cost.is_stopped,
    }

"""What building costs: time and peak memory for a checkpoint far larger than that memory.

For the CPU the weights are holes in sparse files of the true sizes, so the benchmark takes no
disk; a build never reads them, which is what the peak memory shows. Engines hold the weights, and
equal ones only once, so for them the weights are random. Their peak memory counts the mapped
weight files too, which the system can drop.
"""

from __future__ import annotations

from typing import Annotated, Literal

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.process import build_synthetic
from dflash_perf.bench.repeat import show, spread
from dflash_trt.checkpoints.sizes import DecoderSizes, LayerSizes
from dflash_trt.planning.known_pairs import find_pair
from dflash_trt.synthetic.qwen3 import resize, write_pair

ExecutorName = Annotated[Literal["cpu", "tensorrt-rtx"], "What to build for."]
LAYER = LayerSizes(heads=16, kv_heads=8, head_dim=128)
SIZES = DecoderSizes(hidden_size=2048, intermediate_size=6144, layers=(LAYER,) * 18)
TWO_GB = resize(
    find_pair("qwen3-8b"),
    SIZES,
    draft_layers=5,
    block_size=16,
    vocab_size=32_000,
    max_position_embeddings=8192,
)


@bench(runs=5, variant="executor")
def measure(work: Work, *, executor: ExecutorName = "cpu") -> Figures:
    size = write_pair(work.folder, TWO_GB, dtype="BF16", random=executor != "cpu")
    options = ("--executor", executor, "--max-seq-len", str(TWO_GB.target.max_position_embeddings))
    bundles = [work.folder / f"bundle-{number}" for number in range(work.runs)]
    costs = [build_synthetic(work.folder, bundle, *options) for bundle in bundles]
    seconds = spread([cost.seconds for cost in costs])
    memory = spread([cost.peak_resident / 2**30 for cost in costs])
    click.echo(
        f"{size / 1e9:.2f} GB of weights: {show(seconds, '.2f')} s, peak {memory['max']:.2f} GiB"
    )
    engines = {one.stem: one.stat().st_size for one in bundles[0].glob("engines/*/*.engine")}
    return {
        "weight_bytes": size,
        "seconds": seconds,
        "peak_memory_gib": memory,
        "engine_bytes": engines,
    }

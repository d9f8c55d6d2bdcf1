"""What gpt-oss-120b's size costs here: building its graphs, and recoding one layer's experts.

The build's weights are holes of the true shapes, which it never reads. The layer is 128 experts in
MXFP4 with random codes and scales, about 1.7 GB, rewritten as NVFP4 and as bf16 in a process of its
own, and waited for until it is on the disk (fsync); CPU seconds are those of that process, start
and imports included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.process import build_synthetic, rewrite
from dflash_perf.bench.repeat import spread, spreads
from dflash_perf.synthetic.gpt_oss import write_expert_layer, write_gpt_oss_120b
from dflash_trt.checkpoints.folder import open_checkpoint
from dflash_trt.core.progress import SilentProgress
from dflash_trt.quantization.experts import ExpertFormat, convert_experts

MAX_SEQ_LEN = 131_072
EXPERTS = 128


def convert(source: Path, output: Path, form: ExpertFormat) -> dict[str, float]:
    """Rewrites a checkpoint's experts."""
    written = convert_experts(open_checkpoint(source), form, output, SilentProgress())
    reports = written.reports.values()
    return {
        "bytes": written.bytes,
        "exact_blocks": sum(report.exact for report in reports),
        "requantized_blocks": sum(report.requantized for report in reports),
    }


@bench(runs=3)
def measure(
    work: Work, *, experts: Annotated[int, click.IntRange(1, EXPERTS)] = EXPERTS
) -> Figures:
    figures: Figures = {"experts": experts, "build": _measure_build(work)}
    layer = write_expert_layer(work.folder / "layer", experts)
    for form in ExpertFormat:
        measured = rewrite(work, convert, work.folder / "layer", form)
        last = measured[-1]
        found = spreads(measured, "seconds", "cpu_seconds", "peak_memory_mib")
        seconds = found["seconds"]["median"]
        click.echo(
            f"{form}: {layer / 1e9:.2f} GB of experts to {last['bytes'] / 1e9:.2f} GB in "
            f"{seconds:.2f} s ({layer / 1e6 / seconds:,.0f} MB/s read), "
            f"{found['cpu_seconds']['median']:.2f} s of CPU, "
            f"peak {found['peak_memory_mib']['max']:.0f} MiB; "
            f"{last['exact_blocks']:,} blocks exact, {last['requantized_blocks']:,} not"
        )
        figures[form.value] = {
            "layer_bytes": layer,
            **found,
            "read_mb_per_s": layer / 1e6 / seconds,
            "bytes": last["bytes"],
            "exact_blocks": last["exact_blocks"],
            "requantized_blocks": last["requantized_blocks"],
        }
    return figures


def _measure_build(work: Work) -> Figures:
    size = write_gpt_oss_120b(work.folder)
    bundles = [work.folder / f"bundle-{number}" for number in range(work.runs)]
    options = ("--max-seq-len", str(MAX_SEQ_LEN))
    costs = [build_synthetic(work.folder, bundle, *options) for bundle in bundles]
    seconds = spread([cost.seconds for cost in costs])
    memory = spread([cost.peak_resident / 2**30 for cost in costs])
    files = (path.stat() for path in bundles[0].rglob("*") if path.is_file())
    own = sum(file.st_size for file in files if file.st_nlink == 1)
    click.echo(
        f"build: {size / 1e9:.1f} GB of weights in {seconds['median']:.2f} s, peak "
        f"{memory['max']:.2f} GiB, {own / 1e6:.1f} MB of its own"
    )
    return {
        "weight_bytes": size,
        "seconds": seconds,
        "peak_memory_gib": memory,
        "own_bytes": own,
    }

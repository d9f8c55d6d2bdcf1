"""What gpt-oss-120b's size costs here: building its graphs, and recoding one layer's experts.

    python -m dflash_perf.expert_cost --output perf/results

The build's weights are holes of the true shapes (`full_shape.py`), which it never reads. The layer
is 128 experts in MXFP4 with random codes and scales, about 1.7 GB, rewritten as NVFP4 and as bf16
in a process of its own, and waited for until it is on the disk (fsync); CPU seconds are those of
that process, start and imports included.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np

from dflash_perf.build_cost import build_once
from dflash_perf.full_shape import TARGET, expert_tensors, write_gpt_oss_120b
from dflash_perf.record import spread, write_record
from dflash_perf.synthetic import encode_header
from dflash_trt.quantization.experts import ExpertFormat

CONFIG = """\
description: gpt-oss-120b in holes
target: {checkpoint: target}
draft: {checkpoint: draft}
max_seq_len: 131072
"""
EXPERTS = TARGET["num_local_experts"]
_CHUNK = 1 << 24
# Exponents of 2 as trained weights have them, all in NVFP4's reach.
_SCALES = (-12, -4)
# Run in a process of its own, so that its peak memory is that of converting alone.
_RUN = """
import json, sys, time
from pathlib import Path
from dflash_trt.checkpoints.folder import open_checkpoint
from dflash_trt.quantization.experts import ExpertFormat, convert_experts

class Silent:
    def stage(self, name, total, unit="bytes"): pass
    def advance(self, count): pass

form = ExpertFormat(sys.argv[3])
written = convert_experts(open_checkpoint(sys.argv[1]), form, Path(sys.argv[2]), Silent())
status = Path("/proc/self/status").read_text()
peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
reports = written.reports.values()
print(json.dumps({
    "cpu_seconds": time.process_time(),
    "peak_memory_mib": int(peak) / 2**10,
    "bytes": written.bytes,
    "exact_blocks": sum(report.exact for report in reports),
    "requantized_blocks": sum(report.requantized for report in reports),
}))
"""


def write_layer(folder: Path, experts: int) -> int:
    """A checkpoint of one layer's experts and nothing else; its bytes."""
    folder.mkdir()
    config = {"quantization_config": TARGET["quantization_config"]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = expert_tensors(experts, "model.layers.0.mlp.experts")
    header, size = encode_header(tensors)
    generator = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        for name, (dtype, shape) in tensors.items():
            left = int(np.prod(shape)) * (2 if dtype == "BF16" else 1)
            low, high = (127 + one for one in _SCALES) if "scales" in name else (0, 256)
            while left:
                count = min(left, _CHUNK)
                file.write(generator.integers(low, high, count, np.uint8).tobytes())
                left -= count
    return size


def convert_once(source: Path, output: Path, form: ExpertFormat) -> dict[str, float]:
    """Converts `source` in a process of its own; its figures and `seconds`."""
    command = [sys.executable, "-c", _RUN, str(source), str(output), form.value]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise click.ClickException(f"converting failed with exit code {done.returncode}")
    return {"seconds": seconds, **json.loads(done.stdout)}


@click.command()
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True)
@click.option("--experts", type=click.IntRange(1, EXPERTS), default=EXPERTS, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Folder to record the run in.")
def main(runs: int, experts: int, output: Path | None) -> None:
    """Measure building gpt-oss-120b's graphs and converting one layer of its experts."""
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_gpt_oss_120b(folder)
        (folder / "pair.yaml").write_text(CONFIG, encoding="utf-8")
        built = [build_once(folder, number, "cpu") for number in range(runs)]
        seconds, memory = (spread(list(values)) for values in zip(*built, strict=True))
        own = sum(
            path.stat().st_size
            for path in (folder / "bundle-0").rglob("*")
            if path.is_file() and path.stat().st_nlink == 1
        )
        click.echo(
            f"build: {size / 1e9:.1f} GB of weights in {seconds['median']:.2f} s, peak "
            f"{memory['max']:.2f} GiB, {own / 1e6:.1f} MB of its own"
        )
        figures["build"] = {
            "weight_bytes": size,
            "seconds": seconds,
            "peak_memory_gib": memory,
            "own_bytes": own,
        }
        layer = write_layer(folder / "layer", experts)
        for form in ExpertFormat:
            measured = []
            for _ in range(runs):
                measured.append(convert_once(folder / "layer", folder / "out", form))
                shutil.rmtree(folder / "out")
            seconds = spread([one["seconds"] for one in measured])
            cpu = spread([one["cpu_seconds"] for one in measured])
            last = measured[-1]
            click.echo(
                f"{form}: {layer / 1e9:.2f} GB of experts to {last['bytes'] / 1e9:.2f} GB in "
                f"{seconds['median']:.2f} s ({layer / 1e6 / seconds['median']:,.0f} MB/s read), "
                f"{cpu['median']:.2f} s of CPU, "
                f"peak {max(one['peak_memory_mib'] for one in measured):.0f} MiB; "
                f"{last['exact_blocks']:,} blocks exact, {last['requantized_blocks']:,} not"
            )
            figures[form.value] = {
                "layer_bytes": layer,
                "seconds": seconds,
                "cpu_seconds": cpu,
                "read_mb_per_s": layer / 1e6 / seconds["median"],
                "peak_memory_mib": spread([one["peak_memory_mib"] for one in measured]),
                "bytes": last["bytes"],
                "exact_blocks": last["exact_blocks"],
                "requantized_blocks": last["requantized_blocks"],
            }
    if output is not None:
        record = {"experts": experts, **figures}
        click.echo(write_record(output, "expert-cost", "dflash_perf.expert_cost", record))


if __name__ == "__main__":
    main()

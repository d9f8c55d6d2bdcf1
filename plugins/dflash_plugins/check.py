"""Every kernel on the GPU that is here: what it computes, and how fast.

    python -m dflash_plugins.check -o perf/results/DATE-plugins-GPU.json

Not run on a GPU yet; tested against a stand-in for one. Speed needs PyTorch for CUDA. `--no-speed`
leaves it out, for example under `compute-sanitizer --tool racecheck` (or memcheck).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from dflash_plugins.accept import accuracy as accept_accuracy
from dflash_plugins.accept import benchmark as accept_benchmark
from dflash_plugins.block_attention import accuracy as block_attention_accuracy
from dflash_plugins.block_attention import benchmark as block_attention_benchmark
from dflash_plugins.gated_delta_step import accuracy as gated_delta_step_accuracy
from dflash_plugins.gated_delta_step import benchmark as gated_delta_step_benchmark
from dflash_plugins.kv_cache_update import accuracy as kv_cache_update_accuracy
from dflash_plugins.kv_cache_update import benchmark as kv_cache_update_benchmark
from dflash_plugins.kv_feature_injection import accuracy as kv_feature_injection_accuracy
from dflash_plugins.kv_feature_injection import benchmark as kv_feature_injection_benchmark
from dflash_plugins.roofline import Predictor, open_predictor
from dflash_plugins.row_sample import accuracy as row_sample_accuracy
from dflash_plugins.row_sample import benchmark as row_sample_benchmark
from dflash_plugins.table import FOLDERS
from dflash_plugins.testing.gpu import GpuRunner, KernelLauncher, TorchRunner, load_driver
from dflash_plugins.testing.numeric import Accuracy
from dflash_plugins.testing.spread import spread
from dflash_trt.core.machine import describe_host
from dflash_trt.core.user_cache import user_cache_file
from dflash_trt.errors import DflashError, one_line
from dflash_trt.hardware.device import Device, load_cuda
from dflash_trt.hardware.gpus import arches

NEEDS_GPU = "kernels are checked on an NVIDIA GPU; python -m dflash_plugins.compile needs none"
RECORDED = ("dflash-trt", "numpy", "cuda-python", "triton", "torch")


CHECKS: dict[str, tuple[Any, Any]] = {
    "accept": (accept_accuracy, accept_benchmark),
    "block_attention": (block_attention_accuracy, block_attention_benchmark),
    "gated_delta_step": (gated_delta_step_accuracy, gated_delta_step_benchmark),
    "kv_cache_update": (kv_cache_update_accuracy, kv_cache_update_benchmark),
    "kv_feature_injection": (kv_feature_injection_accuracy, kv_feature_injection_benchmark),
    "row_sample": (row_sample_accuracy, row_sample_benchmark),
}
"""Of each operation: how its accuracy is checked, and what is measured."""


def check(device: Device, driver: Any, folders: Sequence[str], torch: Any = None) -> dict[str, Any]:
    """A record of accuracy and, with `torch`, of speed; "passed" covers accuracy alone.

    Raises:
        DflashError: there are no kernels for this GPU.
    """
    launcher = open_launcher(device, driver)
    accuracy = [
        asdict(one) for folder in folders for one in check_accuracy(folder, device, launcher)
    ]
    record = {
        "name": "plugins",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m dflash_plugins.check",
        "machine": {"gpu": device.describe(), **describe_host(RECORDED)},
        "passed": all(row["mismatch"] is None for row in accuracy),
        "accuracy": accuracy,
    }
    if torch is None:
        return record
    runner = TorchRunner(torch, launcher)
    copy = runner.copy_bytes_per_second()
    predict = open_predictor(device, user_cache_file("kernels"))
    rows = [row for folder in folders for row in measure(folder, torch, runner, copy, predict)]
    return record | {"copy_bytes_per_second": copy, "speed": rows}


def open_launcher(device: Device, driver: Any) -> KernelLauncher:
    """Launches kernels that are compiled for `device`.

    Raises:
        DflashError: there are none.
    """
    arch = arches().get(device.arch)
    if arch is None or arch.kernels is None:
        raise DflashError(f"there are no kernels for {device.arch}, {device.name}")
    return KernelLauncher(driver, arch.kernels, user_cache_file("kernels"))


def check_accuracy(folder: str, device: Device, launcher: KernelLauncher) -> Iterator[Accuracy]:
    """One operation's cases as they are found."""
    accuracy, _ = CHECKS[folder]
    found: Iterator[Accuracy] = accuracy.check_accuracy(GpuRunner(device, launcher).run)
    return found


def measure(
    folder: str, torch: Any, runner: TorchRunner, copy: float, predict: Predictor | None = None
) -> Iterator[dict[str, Any]]:
    """One operation's measurements; a case that does not fit the GPU's memory gets an error row.

    `copy` is the bandwidth of a copy, bytes/s; `predict` has the least times on this GPU.
    Any part of the rows is spread over all of them.
    """
    _, benchmark = CHECKS[folder]
    for point in spread(benchmark.points()):
        try:
            row = benchmark.measure(torch, point, runner)
        except torch.cuda.OutOfMemoryError:
            row = {"operation": folder, "case": point.name, "error": "out of memory"}
        if "bytes_per_second" in row:
            row["of_copy"] = row["bytes_per_second"] / copy
        if predict and "seconds" in row and "required_flops" not in row:
            row["least_seconds"] = predict(point, row.get("required_bytes"))
        torch.cuda.empty_cache()
        yield row


def _open_device() -> Device:
    load_cuda()
    try:
        return Device()
    except DflashError as error:
        raise DflashError(error.what, fix=NEEDS_GPU) from error


def describe(record: dict[str, Any]) -> list[str]:
    """The record as lines for a terminal."""
    gpu = record["machine"]["gpu"]
    lines = [f"{gpu['name']} ({gpu['arch']}), CUDA {gpu['driver_cuda']}"]
    for row in record["accuracy"]:
        mark = "yes" if row["mismatch"] is None else "no "
        figures = row["mismatch"] or f"error {row['error']:.3g}, bound {row['bound']:.3g}"
        lines.append(f"  {mark}  {row['name']}: {figures}")
    if "speed" in record:
        lines.append(f"copy {record['copy_bytes_per_second'] / 1e9:,.0f} GB/s")
    for row in record.get("speed", []):
        lines.append(f"  {row['operation']}, {row['case']}: {describe_speed(row)}")
    return lines


def describe_speed(row: dict[str, Any]) -> str:
    """The figures of a measurement."""
    if "seconds" not in row:
        return str(row["error"])
    figures = [f"{row['seconds'] * 1e6:,.1f} µs"]
    if "least_seconds" in row:
        figures.append(f"at least {row['least_seconds'] * 1e6:,.1f}")
    if "of_copy" in row:
        figures.append(f"{row['of_copy']:.0%} of copy")
    if "flops_per_second" in row:
        figures.append(f"{row['flops_per_second'] / 1e12:,.0f} TFLOP/s")
    figures += [f"{name} {seconds * 1e6:,.1f}" for name, seconds in row["rival_seconds"].items()]
    return ", ".join(figures)


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option(
    "--operation",
    "folders",
    multiple=True,
    type=click.Choice(FOLDERS),
    help="Only this one; repeatable.",
)
@click.option("--no-speed", is_flag=True, help="Accuracy alone, which needs no PyTorch.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="File for the record."
)
def main(folders: tuple[str, ...], no_speed: bool, output: Path | None) -> None:
    if output is not None and not output.parent.is_dir():  # checked before minutes of measuring
        raise click.ClickException(f"{output.parent}: no such folder")
    try:
        device = _open_device()
        torch = None if no_speed else importlib.import_module("torch")
        record = check(device, load_driver(), folders or FOLDERS, torch)
        device.close()
    except (DflashError, ImportError) as error:
        message = error.message if isinstance(error, DflashError) else one_line(error)
        raise click.ClickException(message) from error
    for line in describe(record):
        click.echo(line)
    if output is not None:
        output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if not record["passed"]:
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    main()

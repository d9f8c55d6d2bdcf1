"""What `dflash-trt doctor --gpu-check` asks of each operation: its results, and its times.

Not run on a GPU yet; tested against a stand-in for one. Times need PyTorch for CUDA.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from dflash_plugins.roofline import Predictor
from dflash_plugins.testing.gpu import GpuRunner, KernelLauncher, TorchRunner
from dflash_plugins.testing.numeric import Accuracy, spread
from dflash_trt.core.user_cache import user_cache_file
from dflash_trt.errors import DflashError
from dflash_trt.hardware.device import Device
from dflash_trt.hardware.gpus import arches


def open_launcher(device: Device, driver: Any) -> KernelLauncher:
    """Launches kernels that are compiled for `device`.

    Raises:
        DflashError: there are none.
    """
    arch = arches().get(device.arch)
    if arch is None or arch.kernels is None:
        raise DflashError(f"there are no kernels for {device.arch}, {device.name}")
    return KernelLauncher(driver, arch.kernels, user_cache_file("kernels"))


def import_checks(folder: str) -> Any:
    """The module of an operation's folder that has its checks."""
    return importlib.import_module(f"dflash_plugins.{folder}.checks")


def check_accuracy(folder: str, device: Device, launcher: KernelLauncher) -> Iterator[Accuracy]:
    """One operation's cases as they are found."""
    checks = import_checks(folder)
    found: Iterator[Accuracy] = checks.check_accuracy(GpuRunner(device, launcher).run)
    return found


def measure(
    folder: str, torch: Any, runner: TorchRunner, copy: float, predict: Predictor | None = None
) -> Iterator[dict[str, Any]]:
    """One operation's measurements; a case that does not fit the GPU's memory gets an error row.

    `copy` is the bandwidth of a copy, bytes/s; `predict` has the least times on this GPU.
    Any part of the rows is spread over all of them.
    """
    checks = import_checks(folder)
    for point in spread(checks.points()):
        try:
            row = checks.measure(torch, point, runner)
        except torch.cuda.OutOfMemoryError:
            row = {"operation": folder, "case": point.name, "error": "out of memory"}
        if "bytes_per_second" in row:
            row["of_copy"] = row["bytes_per_second"] / copy
        if predict and "seconds" in row and "required_flops" not in row:
            row["least_seconds"] = predict(point, row.get("required_bytes"))
        torch.cuda.empty_cache()
        yield row


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

"""What `dflash-trt doctor --gpu-check` asks of each operation: its results, and its times.

Not run on a GPU yet; tested against a stand-in for one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from dflash_plugins.testing.gpu import GpuRunner, KernelLauncher, Timer
from dflash_plugins.testing.numeric import Accuracy, check_all, spread
from dflash_plugins.testing.sdpa import sdpa_seconds
from dflash_trt.core.user_cache import user_cache_file
from dflash_trt.errors import DflashError
from dflash_trt.hardware.device import Device
from dflash_trt.hardware.gpus import arches, match_gpu


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


def check_accuracy(
    folder: str, device: Device, launcher: KernelLauncher, share: int = 0, shares: int = 1
) -> Iterator[Accuracy]:
    """One operation's cases as they are found; of `shares` of them one."""
    checks = import_checks(folder).checks()[share::shares]
    return check_all(checks, GpuRunner(device, launcher).run)


def measure(folder: str, device: Device, launcher: KernelLauncher) -> Iterator[dict[str, Any]]:
    """One operation's measurements; a case that does not fit the GPU's memory gets an error row.

    Any part of the rows is spread over all of them.
    """
    timer, gpu = Timer(device, launcher), match_gpu(device.name, device.arch, device.total_bytes)
    for point in spread(import_checks(folder).points()):
        row: dict[str, Any] = {"operation": folder, "case": point.name}
        try:
            tactics = timer.tactic_seconds(point)
        except DflashError as error:
            yield row | {"error": error.message}
            continue
        row |= {"seconds": min(tactics), "tactic_seconds": tactics, "required_bytes": point.moved}
        if folder == "block_attention" and (beside := sdpa_seconds(point)) is not None:
            row["sdpa_seconds"] = beside
        if gpu is not None and point.moved:
            row["bandwidth_share"] = point.moved / min(tactics) / gpu.bandwidth
        yield row


def describe_speed(row: dict[str, Any]) -> str:
    """The figures of a measurement."""
    if "seconds" not in row:
        return str(row["error"])
    figures = [f"{row['seconds'] * 1e6:,.1f} µs"]
    if row["required_bytes"]:
        figures.append(f"{row['required_bytes'] / row['seconds'] / 1e9:,.0f} GB/s")
    if "bandwidth_share" in row:
        figures.append(f"{row['bandwidth_share']:.0%} of the memory's bandwidth")
    if "sdpa_seconds" in row:
        figures.append(f"PyTorch's attention {row['sdpa_seconds'] * 1e6:,.1f} µs")
    return ", ".join(figures)

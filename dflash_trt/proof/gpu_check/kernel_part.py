"""The parts of the check that launch this project's kernels themselves: no library has a say.

They need the CUDA driver, cuda-python and Triton language; speed needs PyTorch for CUDA too.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from dflash_plugins.check import check_accuracy, describe_speed, measure, open_launcher
from dflash_plugins.compile import check_compiler
from dflash_plugins.roofline import open_predictor
from dflash_plugins.testing.gpu import KernelLauncher, TorchRunner, load_driver

from dflash_trt.core.user_cache import user_cache_file
from dflash_trt.errors import DflashError, one_line
from dflash_trt.hardware.device import Device
from dflash_trt.proof.gpu_check.gpu_record import OutOfTimeError, PartSkippedError, Probe
from dflash_trt.proof.gpu_check.runner import Setting

# What a case takes at most, its compilation included; none is begun with less.
CASE_SECONDS = 5.0
POINT_SECONDS = 10.0


def check_kernels(folder: str, setting: Setting) -> Iterator[Probe]:
    """The accuracy of one operation's kernels, case by case against float64 or to the bit."""
    with closing(Device()) as device:
        for one in check_accuracy(folder, device, _open(device)):
            detail = "" if one.error is None else f"error {one.error:.3g}, bound {one.bound:.3g}"
            figures = {"error": one.error, "bound": one.bound}
            yield Probe(one.name, one.mismatch is None, one.mismatch or detail, figures)
            if not setting.has(CASE_SECONDS):
                raise OutOfTimeError("the other cases are left to --long")


def measure_kernels(folder: str, setting: Setting) -> Iterator[Probe]:
    """The time of one operation's kernels beside the least that memory allows and their rivals'."""
    torch = load_torch()
    with closing(Device()) as device:
        runner = TorchRunner(torch, _open(device))
        copy = runner.copy_bytes_per_second()
        predict = open_predictor(device, user_cache_file("kernels"))
        detail = f"a copy reaches {copy / 1e9:,.0f} GB/s"
        yield Probe("what is compared", None, detail, {"copy": copy})
        for row in measure(folder, torch, runner, copy, predict):
            name = f"time of {row['operation']}, {row['case']}"
            yield Probe(name, None, describe_speed(row), row)
            if not setting.has(POINT_SECONDS):
                raise OutOfTimeError("the other points are left to --long")


def _open(device: Device) -> KernelLauncher:
    """Raises PartSkippedError where nothing can be launched."""
    try:
        check_compiler()
        return open_launcher(device, load_driver())
    except DflashError as error:
        raise PartSkippedError(error.message) from error


def load_torch() -> Any:
    """PyTorch; PartSkippedError where it is not, or not for CUDA."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise PartSkippedError(f"PyTorch is not installed ({one_line(error, 80)})") from error
    if not torch.cuda.is_available():
        raise PartSkippedError(f"PyTorch {torch.__version__} is not for CUDA")
    return torch

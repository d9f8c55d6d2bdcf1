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
from dflash_trt.proof.gpu_check.probe import OutOfTimeError, PartSkippedError, Probe
from dflash_trt.proof.gpu_check.setting import Setting

# What a case takes at most, its compilation included; none is begun with less.
CASE_SECONDS = 5.0
POINT_SECONDS = 10.0


def check_kernels(folder: str, setting: Setting) -> Iterator[Probe]:
    """The accuracy of one operation's kernels, case by case against float64 or to the bit."""
    with closing(Device()) as device:
        launcher = _open(device)
        for one in check_accuracy(folder, device, launcher):
            figures = "" if one.error is None else f"error {one.error:.3g}, bound {one.bound:.3g}"
            yield Probe(
                name=one.name,
                passed=one.mismatch is None,
                detail=one.mismatch or figures,
                figures={"error": one.error, "bound": one.bound},
            )
            if not setting.has(CASE_SECONDS):
                raise _cut("cases")


def measure_kernels(folder: str, setting: Setting) -> Iterator[Probe]:
    """The time of one operation's kernels beside the least that memory allows and their rivals'."""
    torch = load_torch()
    with closing(Device()) as device:
        runner = TorchRunner(torch, _open(device))
        runner.is_quick = not setting.is_long
        copy = runner.copy_bytes_per_second()
        predict = open_predictor(device, user_cache_file("kernels"))
        rival = _flashinfer() if setting.is_long else "left to --long"
        detail = f"a copy reaches {copy / 1e9:,.0f} GB/s; FlashInfer is {rival}"
        yield Probe(name="what is compared", passed=None, detail=detail, figures={"copy": copy})
        for row in measure(folder, torch, runner, copy, predict):
            name = f"time of {row['operation']}, {row['case']}"
            yield Probe(name=name, passed=None, detail=describe_speed(row), figures=row)
            if not setting.has(POINT_SECONDS):
                raise _cut("points")


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


def _flashinfer() -> str:
    try:
        return f"version {importlib.import_module('flashinfer').__version__}"
    except Exception as error:  # it may not load beside another CUDA
        return f"no rival: {one_line(error, 80)}"


def _cut(what: str) -> OutOfTimeError:
    """What was run is spread over all."""
    return OutOfTimeError(f"the other {what} are left to --long")

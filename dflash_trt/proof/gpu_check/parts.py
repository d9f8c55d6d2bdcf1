"""The parts of the check as a table, in order of worth: what is said first says most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from dflash_plugins.check import check_accuracy, describe_speed, measure, open_launcher
from dflash_plugins.compile import check_compiler
from dflash_plugins.table import FOLDERS
from dflash_plugins.testing.gpu import KernelLauncher, load_driver

from dflash_trt.backends.tensorrt.library import TENSORRT, TENSORRT_RTX, Library
from dflash_trt.errors import DflashError
from dflash_trt.hardware.device import Device
from dflash_trt.proof.gpu_check.cuda_probes import check_cuda, describe_machine
from dflash_trt.proof.gpu_check.engine_part import PAIRS, RandomPair, check_engines
from dflash_trt.proof.gpu_check.gpu_record import PartSkippedError, Probe
from dflash_trt.proof.gpu_check.runner import PartWork, Setting

# Nobody knows yet how long TensorRT takes to choose tactics for a pair.
ENGINE_SECONDS = 180
ACCURACY_SECONDS = {"block_attention": 90, "gated_delta_step": 60, "row_sample": 40}
SPEED_SECONDS = {"block_attention": 90}
# What a case takes at most, its compilation included, and a measurement; none is begun with less.
CASE_SECONDS, POINT_SECONDS = 5.0, 10.0


@dataclass(frozen=True, slots=True)
class Part:
    """One part: a process of its own, so that a fault of the GPU ends no other.

    The record files it under its `name`; it is ended after `seconds`, unless asked for by name.
    """

    name: str
    seconds: float
    work: PartWork


MACHINE = Part("machine", 60, describe_machine)
"""Run first and each time: without it there is no check."""


def check_parts() -> list[Part]:
    """All parts but `MACHINE`.

    Kernels before engines: they need least. Of engines some of each library before the others,
    those with plugins first.
    """
    kernels = [
        Part(f"kernels: {folder}", ACCURACY_SECONDS.get(folder, 30), partial(check_kernels, folder))
        for folder in FOLDERS
    ]
    speeds = [
        Part(f"speed: {folder}", SPEED_SECONDS.get(folder, 30), partial(measure_kernels, folder))
        for folder in sorted(FOLDERS, key=lambda folder: folder != "block_attention")
    ]
    plain = [*(pair for pair in PAIRS if not pair.needs_plugins), None]
    rtx, native = ([_engines(one, pair) for pair in plain] for one in (TENSORRT_RTX, TENSORRT))
    plugged = [_engines(TENSORRT, pair, plugins=True) for pair in (*PAIRS, None)]
    first = [*plugged[:2], rtx[0], native[0], speeds[0]]
    others = [*plugged[2:], *rtx[1:], *native[1:], *speeds[1:]]
    return [Part("CUDA", 30, check_cuda), *kernels, *first, *others]


def _engines(library: Library, pair: RandomPair | None, *, plugins: bool = False) -> Part:
    """Of each kind the first pair counts memory too."""
    kind = f"{library.name} with plugins" if plugins else library.name
    first = next(one for one in PAIRS if plugins or not one.needs_plugins)
    work = partial(check_engines, library, pair, plugins=plugins, counts_memory=pair is first)
    name = f"{kind}: {'demo pair' if pair is None else pair.name}"
    return Part(name, ENGINE_SECONDS, work)


def check_kernels(folder: str, setting: Setting) -> Iterator[Probe]:
    """The accuracy of one operation's kernels, case by case against float64 or to the bit."""
    with closing(Device()) as device:
        for one in check_accuracy(folder, device, _open(device)):
            detail = "" if one.error is None else f"error {one.error:.3g}, bound {one.bound:.3g}"
            figures = {"error": one.error, "bound": one.bound}
            yield Probe(one.name, one.mismatch is None, one.mismatch or detail, figures)
            setting.leave_time(CASE_SECONDS, "the other cases")


def measure_kernels(folder: str, setting: Setting) -> Iterator[Probe]:
    """The time of one operation's kernels beside what they reach of the memory's bandwidth."""
    with closing(Device()) as device:
        for row in measure(folder, device, _open(device)):
            name = f"time of {row['operation']}, {row['case']}"
            yield Probe(name, None, describe_speed(row), row)
            setting.leave_time(POINT_SECONDS, "the other points")


def _open(device: Device) -> KernelLauncher:
    """Raises PartSkippedError where nothing can be launched."""
    try:
        check_compiler()
        return open_launcher(device, load_driver())
    except DflashError as error:
        raise PartSkippedError(error.message) from error

"""The parts of the check, in order of worth, run within a budget of time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dflash_plugins.check import check_accuracy, describe_speed, measure, open_launcher
from dflash_plugins.compile import check_compiler
from dflash_plugins.table import FOLDERS
from dflash_plugins.testing.gpu import KernelLauncher, load_driver

from dflash_trt.backends.tensorrt.library import TENSORRT, TENSORRT_RTX, Library
from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError, nearest, one_line
from dflash_trt.hardware.device import Device
from dflash_trt.proof.gpu_check.cuda_probes import check_cuda, describe_machine
from dflash_trt.proof.gpu_check.engine_part import PAIRS, RandomPair, check_engines
from dflash_trt.proof.gpu_check.gpu_record import (
    CheckRecord,
    PartOutcome,
    PartSkippedError,
    Probe,
    open_record,
)
from dflash_trt.proof.gpu_check.runner import PartWork, Setting, run_in_child

BUDGET_SECONDS = 580
"""Ten minutes with the end of a part that does not heed its time."""
LONG_SECONDS = 3600
"""Of a part that was asked for by name: there is no budget."""
# Nobody knows yet how long TensorRT takes to choose tactics for a pair.
ENGINE_SECONDS = 180
ACCURACY_SECONDS = {"block_attention": 90, "gated_delta_step": 60, "row_sample": 40}
SPEED_SECONDS = {"block_attention": 90}


@dataclass(frozen=True, slots=True)
class Part:
    """One part: a process of its own, so that a fault of the GPU ends no other.

    The record files it under its `name`; it is ended after `seconds`, unless asked for by name.
    """

    name: str
    seconds: float
    work: PartWork


def check_parts() -> list[Part]:
    """All parts. Kernels before engines: they need least.

    Of engines some of each library before the others, those with plugins first.
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
    kind = f"{library.name} with plugins" if plugins else library.name
    name = f"{kind}: {'demo pair' if pair is None else pair.name}"
    return Part(name, ENGINE_SECONDS, partial(check_engines, library, pair, plugins=plugins))


def check_kernels(folder: str, setting: Setting) -> Iterator[Probe]:
    """The accuracy of one operation's kernels, case by case against float64 or to the bit."""
    with closing(Device()) as device:
        for one in check_accuracy(folder, device, _open(device)):
            detail = "" if one.error is None else f"error {one.error:.3g}, bound {one.bound:.3g}"
            figures = {"error": one.error, "bound": one.bound}
            yield Probe(one.name, one.mismatch is None, one.mismatch or detail, figures)
            setting.leave_time("the other cases")


def measure_kernels(folder: str, setting: Setting) -> Iterator[Probe]:
    """The time of one operation's kernels beside what they reach of the memory's bandwidth."""
    with closing(Device()) as device:
        for row in measure(folder, device, _open(device)):
            name = f"time of {row['operation']}, {row['case']}"
            yield Probe(name, None, describe_speed(row), row)
            setting.leave_time("the other points")


def _open(device: Device) -> KernelLauncher:
    """Raises PartSkippedError where nothing can be launched."""
    try:
        check_compiler()
        return open_launcher(device, load_driver())
    except DflashError as error:
        raise PartSkippedError(error.message) from error


def check_gpu(folder: Path, progress: Progress, only: Sequence[str] = ()) -> CheckRecord:
    """Runs what the record in `folder` does not have yet; it is written after every part.

    `only` names parts that are run instead, known or not, for as long as they take.

    Raises:
        DflashError: there is no GPU; `folder` holds the record of another, or a name of `only` is
            no part's (usage).
        KeyboardInterrupt, SystemExit: the user's; the record has the parts that had ended.
    """
    parts = check_parts()
    known_names = [part.name for part in parts]
    for name in only:
        if name not in known_names:
            what = f"no part is called {one_line(name, 80)!r}{nearest(name, known_names)}"
            raise DflashError(what, where="--part", usage=True)
    ends = time.monotonic() + BUDGET_SECONDS
    progress.stage("machine", None)
    machine = _run(describe_machine, 60)  # without it there is no check
    if machine.status != "done":
        if machine.status == "failed":
            raise DflashError(str(machine.reason))
        what = f"the GPU does not answer: {machine.reason}"
        raise DflashError(what, fix="nvidia-smi says whether it is well")
    record = open_record(folder, machine.probes[0].to_json()["figures"])
    folder.mkdir(parents=True, exist_ok=True)
    record.save(folder)  # a folder that cannot be written to is known before minutes of work
    for part in parts:
        known = record.parts.get(part.name)
        if part.name not in only if only else known and known.status != "not run":
            continue
        if not only and time.monotonic() + part.seconds > ends:
            record.parts[part.name] = PartOutcome("not run", "out of time")
        else:
            progress.stage(part.name, None)
            record.parts[part.name] = _run(part.work, LONG_SECONDS if only else part.seconds)
        record.save(folder)
    return record


def _run(work: PartWork, seconds: float) -> PartOutcome:
    with tempfile.TemporaryDirectory(prefix="dflash-trt-") as folder:
        return run_in_child(work, Setting(Path(folder), time.monotonic() + seconds))

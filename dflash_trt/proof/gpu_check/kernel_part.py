"""The parts of the check that launch kernels: right, unchanged under stress, clean, and fast.

    python -m dflash_trt.proof.gpu_check.kernel_part OPERATION SECONDS

is what compute-sanitizer watches: the accuracy of one operation, in one process.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import product
from pathlib import Path

from dflash_plugins.check import (
    check_accuracy,
    describe_speed,
    import_checks,
    measure,
    open_launcher,
)
from dflash_plugins.compile import check_compiler
from dflash_plugins.testing.gpu import GpuRunner, KernelLauncher, Point, load_driver
from dflash_plugins.testing.numeric import spread

from dflash_trt.errors import DflashError, one_line
from dflash_trt.hardware.device import Device
from dflash_trt.proof.gpu_check.gpu_record import PartSkippedError, Probe
from dflash_trt.proof.gpu_check.runner import Setting, run_here

# row_sample keeps a list in global memory, which racecheck does not see: however many warps take
# part, and however often, the tokens are the same.
STRESS_WARPS, STRESS_REPEATS, STRESS_BYTES = (1, 2, 4, 8, 16), 12, 1 << 25
SCRATCH = "listed"
TOOL = "compute-sanitizer"
# The process under the tool ends so much before its part, which would be ended as hanging.
TOOL_SECONDS = 20
NOT_DONE = 8


Find = Callable[[Device, KernelLauncher], Iterator[Probe]]


def _launch(find: Find, setting: Setting) -> Iterator[Probe]:
    """What `find` finds on this machine's GPU while there is time.

    Raises:
        PartSkippedError: nothing can be launched.
    """
    with closing(Device()) as device:
        try:
            check_compiler()
            launcher = open_launcher(device, load_driver())
        except DflashError as error:
            raise PartSkippedError(error.message) from error
        for probe in find(device, launcher):
            yield probe
            setting.leave_time("the others")


def check_kernels(folder: str, share: int, shares: int, setting: Setting) -> Iterator[Probe]:
    """The accuracy of one operation's kernels, case by case against float64 or to the bit.

    Of `shares` parts that run at once this is one.
    """

    def find(device: Device, launcher: KernelLauncher) -> Iterator[Probe]:
        for one in check_accuracy(folder, device, launcher, share, shares):
            detail = "" if one.error is None else f"error {one.error:.3g}, bound {one.bound:.3g}"
            figures = {"error": one.error, "bound": one.bound}
            yield Probe(one.name, one.mismatch is None, one.mismatch or detail, figures)

    return _launch(find, setting)


def compile_kernels(folder: str, share: int, shares: int, setting: Setting) -> Iterator[Probe]:
    """Compiles and loads what is timed later, when nothing else may run."""

    def find(device: Device, launcher: KernelLauncher) -> Iterator[Probe]:
        cases = (case for point in spread(import_checks(folder).points()) for case in point.cases)
        every = ((case, tactic) for case in cases for tactic in range(case.operation.tactics))
        specs = list(dict.fromkeys(case.kernel_spec(tactic) for case, tactic in every))
        for spec in specs[share::shares]:
            launcher.load(spec)
            yield Probe(f"{spec.kernel} compiles and loads", True, str(dict(spec.constants)))

    return _launch(find, setting)


def stress_kernels(folder: str, setting: Setting) -> Iterator[Probe]:
    """Whether results keep their bits, repeat by repeat, over numbers of warps."""

    def find(device: Device, launcher: KernelLauncher) -> Iterator[Probe]:
        for point in spread(import_checks(folder).points()):
            if sum(spec.nbytes for spec in point.cases[0].inputs.values()) <= STRESS_BYTES:
                yield _stress(point, device, launcher)

    return _launch(find, setting)


def measure_kernels(folder: str, setting: Setting) -> Iterator[Probe]:
    """The time of one operation's kernels beside what they reach of the memory's bandwidth."""

    def find(device: Device, launcher: KernelLauncher) -> Iterator[Probe]:
        for row in measure(folder, device, launcher):
            name = f"time of {row['operation']}, {row['case']}"
            yield Probe(name, None, describe_speed(row), row)

    return _launch(find, setting)


def _stress(point: Point, device: Device, launcher: KernelLauncher) -> Probe:
    given, last = point.inputs(), point.cases[-1]
    wanted, other = dict[str, bytes](), list[str]()
    for repeat, warps in product(range(STRESS_REPEATS), STRESS_WARPS):
        known = dict(given)
        for case in point.cases:
            inputs = {name: known[name] for name in case.operation.inputs}
            # Sums of the launches before it may round otherwise.
            runner = GpuRunner(device, launcher, warps if case is last else None)
            known |= runner.run(case.operation.name, inputs, case.attributes)
        found = {one: known[one].tobytes() for one in last.operation.outputs if one != SCRATCH}
        wanted = wanted or found
        other += [f"{warps} warps, repeat {repeat}"] * (found != wanted)
    detail = f"{STRESS_REPEATS} repeats of {STRESS_WARPS} warps, unlike the first: "
    detail += ", ".join(other[:4]) or "none"
    return Probe(f"{last.operation.name}, {point.name}: the same bits", not other, detail)


def sanitize(tool: str, folder: str, setting: Setting) -> Iterator[Probe]:
    """The accuracy of one operation under a tool of compute-sanitizer.

    Raises:
        PartSkippedError: it is not here, or does not work here, as under some virtualisation.
    """
    found = shutil.which(TOOL) or shutil.which(TOOL, path="/usr/local/cuda/bin")
    if found is None:
        raise PartSkippedError(f"{TOOL}, of the CUDA toolkit, is not here")
    seconds = max(1.0, setting.ends - time.monotonic() - TOOL_SECONDS)
    command = [found, "--tool", tool, "--target-processes", "all", "--print-limit", "20"]
    command += ["--error-exitcode", "9", sys.executable, "-m", __spec__.name, folder, f"{seconds}"]
    # Without a limit: the part's own end takes the tool's processes with it.
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode == NOT_DONE:
        own = [line for line in said if not line.startswith("=========")]
        raise PartSkippedError(f"not all ran under {TOOL}: {one_line((own or ['silent'])[-1])}")
    summary = next((line.strip("= ") for line in said if " SUMMARY: " in line), None)
    if summary is None:
        raise PartSkippedError(f"{TOOL} does not work here: {one_line((said or ['silent'])[-1])}")
    wrong = [line.strip("= ") for line in said if line.startswith("========= ")][:12]
    detail = f"{summary}; {said[-1]}" if done.returncode == 0 else f"{summary}; {wrong}"
    yield Probe(f"{tool} finds nothing in {folder}", done.returncode == 0, detail)


def _main(folder: str, seconds: str) -> int:
    setting = Setting(Path(), time.monotonic() + float(seconds))
    outcome = run_here(lambda given: check_kernels(folder, 0, 1, given), setting)
    print(outcome)
    return (
        NOT_DONE if outcome.status in ("skipped", "out of time") else int(outcome.passed is False)
    )


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))

"""Runs builds in processes of their own and measures them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from dflash_trt.errors import DflashError

_PERIOD_S = 0.05


@dataclass(frozen=True, slots=True)
class BuildCost:
    """Cost of a build; `peak_resident` is bytes, with mapped weight files, which can be dropped."""

    seconds: float
    cpu_seconds: float
    peak_resident: int


def build(target: str | Path, bundle: Path, *options: str) -> BuildCost:
    """Runs `dflash-trt build`.

    Raises:
        DflashError: the build failed.
    """
    command = [sys.executable, "-m", "dflash_trt", "build", "--target", str(target)]
    before, started, peak = _children_seconds(), time.perf_counter(), 0
    with subprocess.Popen([*command, "-o", str(bundle), *options]) as process:
        ended = os.pidfd_open(process.pid)
        while process.poll() is None:
            peak = max(peak, peak_memory(process.pid))
            select.select([ended], [], [], _PERIOD_S)
        os.close(ended)
    seconds = time.perf_counter() - started
    if process.returncode:
        raise DflashError(f"the build failed with exit code {process.returncode}")
    return BuildCost(seconds, _children_seconds() - before, peak)


def build_synthetic(folder: Path, bundle: Path, *options: str) -> BuildCost:
    """Builds the synthetic pair in `folder`."""
    config = folder / "pair.yaml"
    checkpoints = "target: {checkpoint: target}\ndraft: {checkpoint: draft}\n"
    config.write_text(f"description: synthetic\n{checkpoints}", encoding="utf-8")
    return build(config, bundle, *options)


def peak_memory(pid: int | str = "self") -> int:
    """The most resident bytes of a process so far (its VmHWM); 0 once it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


def _children_seconds() -> float:
    usage = getrusage(RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime

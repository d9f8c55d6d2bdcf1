"""Work that is measured in a process of its own."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing import get_context
from pathlib import Path

from dflash_perf.bench.base import Work
from dflash_trt.errors import DflashError

_PERIOD_MS = 50


@dataclass(slots=True)
class BuildCost:
    """What a build took; memory in bytes.

    `peak_resident` counts mapped weight files, which the system can drop; `peak_anonymous` does
    not. `is_stopped` where it went past its limit.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_resident: int = 0
    peak_anonymous: int = 0
    is_stopped: bool = False


def build(target: str | Path, bundle: Path, *options: str, limit: float | None = None) -> BuildCost:
    """Runs `dflash-trt build`, and stops it above `limit` bytes of anonymous memory.

    Raises:
        DflashError: the build failed.
    """
    command = [sys.executable, "-m", "dflash_trt", "build", "--target", str(target)]
    cost = BuildCost()
    started = time.perf_counter()
    process = subprocess.Popen([*command, "-o", str(bundle), *options])
    for memory in _watch(process.pid):
        cost.peak_resident = max(cost.peak_resident, memory["VmHWM"])
        cost.peak_anonymous = max(cost.peak_anonymous, memory["RssAnon"])
        if limit is not None and memory["RssAnon"] > limit:
            process.kill()
            cost.is_stopped = True
    _, status, usage = os.wait4(process.pid, 0)
    cost.seconds = time.perf_counter() - started
    cost.cpu_seconds = usage.ru_utime + usage.ru_stime
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode and not cost.is_stopped:
        raise DflashError(f"the build failed with exit code {process.returncode}")
    return cost


def build_synthetic(
    folder: Path, bundle: Path, *options: str, limit: float | None = None
) -> BuildCost:
    """Builds the synthetic pair in `folder`."""
    config = folder / "pair.yaml"
    checkpoints = "target: {checkpoint: target}\ndraft: {checkpoint: draft}\n"
    config.write_text(f"description: synthetic\n{checkpoints}", encoding="utf-8")
    return build(config, bundle, *options, limit=limit)


def engine_bytes(bundle: Path) -> dict[str, int]:
    """The sizes of a bundle's engines by graph; none where it has none."""
    return {one.stem: one.stat().st_size for one in bundle.glob("engines/*/*.engine")}


def rewrite(
    work: Work, function: Callable[..., dict[str, float]], source: Path, form: StrEnum
) -> list[dict[str, float]]:
    """Lets `function` write `source` anew in `form`, each time in a process of its own.

    Of each run what it returns, the `seconds` and `cpu_seconds` of the process, start and imports
    included, and its `peak_memory_mib`.
    """
    output = work.folder / "rewritten"
    found: list[dict[str, float]] = []
    for _ in range(work.runs):
        started = time.perf_counter()
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            figures = process.submit(_watch_itself, function, source, output, form).result()
        found.append({"seconds": time.perf_counter() - started, **figures})
        shutil.rmtree(output)
    return found


def _watch_itself(function: Callable[..., dict[str, float]], *given: object) -> dict[str, float]:
    figures = function(*given)
    # Not getrusage: its peak includes what the parent held when it forked.
    peak = _memory_of("self")["VmHWM"] / 2**20
    return {"cpu_seconds": time.process_time(), "peak_memory_mib": peak, **figures}


def _memory_of(pid: int | str) -> dict[str, int]:
    """Peak resident (VmHWM) and resident anonymous (RssAnon) bytes of a process; 0 once it ends."""
    found = {"VmHWM": 0, "RssAnon": 0}
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name in found:
                found[name] = 1024 * int(value.split()[0])
    return found


def _watch(pid: int) -> Iterator[dict[str, int]]:
    """The memory of a process every now and then, until it ends."""
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not poll.poll(_PERIOD_MS):
            yield _memory_of(pid)
    finally:
        os.close(descriptor)

"""How many CPU threads a step should have: the physical cores that this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

AUTO: Literal["auto"] = "auto"
SMALL_TARGET = 16_000_000
"""Parameters below which a step has nothing to split: two threads made the demo pair's slower."""

ThreadChoice = int | Literal["auto"]


def choose_threads(wanted: ThreadChoice, parameters: int) -> int:
    """`wanted`, or for "auto" what a target of so many parameters should have here.

    Draft and target run in turn, and idle threads do not spin: each may have all cores.
    """
    if wanted != AUTO:
        return wanted
    return available_cores() if parameters >= SMALL_TARGET else 1


@cache
def available_cores() -> int:
    """Physical cores within this process's affinity, and no more than its cgroups' CPU time."""
    return count_cores(os.sched_getaffinity(0), Path("/"))


def count_cores(cpus: set[int], root: Path) -> int:
    """The same of the logical CPUs `cpus`, by the /sys and /proc below `root`."""
    cores = {_core_of(cpu, root) for cpu in cpus}
    return max(1, min([len(cores), *(int(quota) for quota in _quotas(root))]))


def _core_of(cpu: int, root: Path) -> str:
    """What the hardware threads of one core have in common."""
    siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return _read(siblings) or str(cpu)


def _quotas(root: Path) -> Iterator[float]:
    """CPUs' worth of time that each cgroup above this process may use, of version 2 or 1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if number == "0":
            top, read = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            top, read = root / "sys/fs/cgroup/cpu", _quota_v1
        else:
            continue
        folder = top / path.lstrip("/")
        for one in (folder, *folder.parents):  # a limit of an outer group holds too
            quota = read(one)
            if quota is not None:
                yield quota
            if one == top:
                break


def _quota_v2(folder: Path) -> float | None:
    return _ratio(*(_read(folder / "cpu.max").split() + ["", ""])[:2])


def _quota_v1(folder: Path) -> float | None:
    return _ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    """None where there is no limit: "max", -1, or no such file."""
    limited = quota.isdecimal() and period.isdecimal() and int(quota) and int(period)
    return int(quota) / int(period) if limited else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""

"""How many CPU threads a step should have: the physical cores that this process may use."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Literal

from dflash_trt.core.machine import own_cgroups, read_told

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
    topology = root / "sys/devices/system/cpu"
    siblings = "topology/thread_siblings_list"  # of the hardware threads of one core
    cores = {read_told(topology / f"cpu{cpu}" / siblings) or str(cpu) for cpu in cpus}
    most = len(cores)
    for group in own_cgroups(root):  # a limit of an outer group holds too
        quota, _, period = read_told(group / "cpu.max").partition(" ")
        if quota.isdecimal() and int(quota):  # "max" is no limit
            most = min(most, int(quota) // int(period))
    return max(1, most)

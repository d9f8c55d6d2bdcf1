"""How much memory is free, and the promise of a process to take no more."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from pathlib import Path

from dflash_trt.core.machine import own_cgroups, read_told

ROOT = Path("/")
MEMORY_FILE = Path("/proc/meminfo")
_STATUS_FILE = Path("/proc/self/status")
_KEPT = 16  # one part of so many stays free for others
_BLOCK_BYTES = 512  # of which Linux counts what a file takes on disk
_MAPPINGS = 3  # each of a bundle's graphs maps the weights for itself

_ours: int | None = None


def stay_within_memory(mapped: Iterable[Path] = ()) -> None:
    """Bounds what this process may take from now on by what is free now, swap included.

    A bundle's graph is a program, and may ask for any amount. Beyond the bound it gets none, which
    is one error; without it the kernel would end whatever process it chose. `mapped` are files
    that are mapped beside that, and read again when memory is short. A limit that somebody else
    has set stays as it is.
    """
    global _ours
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft not in (resource.RLIM_INFINITY, _ours):
        return
    free, held = available_memory(), _read_field(_STATUS_FILE, "VmData:", unit=1 << 10)
    if free is None or held is None:
        return
    swap = _read_field(MEMORY_FILE, "SwapFree:", unit=1 << 10) or 0
    files = sum(path.stat().st_blocks for path in mapped) * _BLOCK_BYTES * _MAPPINGS
    limit = held + free - free // _KEPT + swap + files
    _ours = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (_ours, hard))


def available_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    # Inside a container too MemAvailable is the whole machine's.
    system = _read_field(MEMORY_FILE, "MemAvailable:", unit=1 << 10)
    known = (system, *map(_group_memory, own_cgroups(ROOT)))
    return min((one for one in known if one is not None), default=None)


def _group_memory(group: Path) -> int | None:
    """What a cgroup has left; None without a limit."""
    limit, used = (read_told(group / name) for name in ("memory.max", "memory.current"))
    if not (limit.isdecimal() and used.isdecimal()):  # "max"; the root has neither file
        return None
    # memory.current counts the files that were read; those not in use give way at once.
    cached = _read_field(group / "memory.stat", "inactive_file", unit=1) or 0
    return max(0, int(limit) - int(used) + cached)


def _read_field(path: Path, name: str, *, unit: int) -> int | None:
    for line in read_told(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1]) * unit
    return None

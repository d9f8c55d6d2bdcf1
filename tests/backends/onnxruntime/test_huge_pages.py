"""Memory that is mapped inside lies in large pages, other memory stays as it was."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest

from dflash_trt.backends.onnxruntime.huge_pages import in_huge_pages

MIB = 1 << 20
KINDS = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LINUX = (6, 1)


def _kernel() -> tuple[int, ...]:
    release = Path("/proc/sys/kernel/osrelease").read_text(encoding="ascii")
    return tuple(map(int, re.findall(r"\d+", release)[:2]))


def _touched() -> mmap.mmap:
    """32 MiB of anonymous memory, all of it written."""
    memory = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"\x01" * len(memory))
    return memory


def _large(memory: mmap.mmap) -> int:
    """Bytes of the mapping that begins or lies where `memory` does which are in large pages."""
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(address, 16) for address in found.groups())
            inside = start <= place + len(memory) // 2 < end
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the mapping is not listed")


@pytest.mark.skipif(
    not KINDS.exists() or "[madvise]" not in KINDS.read_text() or _kernel() < LINUX,
    reason="Linux 6.1 or newer gives large pages at once, and only where they are asked for",
)
def test_what_is_mapped_inside_is_moved_and_nothing_else():
    earlier = _touched()
    with in_huge_pages():
        inside = _touched()
    later = _touched()
    assert _large(inside) >= len(inside) // 2  # as many as are free
    assert inside[:] == b"\x01" * len(inside)
    assert _large(earlier) == _large(later) == 0


def test_an_error_inside_arrives_as_it_is():
    with pytest.raises(ValueError, match="no session"), in_huge_pages():
        raise ValueError("no session")

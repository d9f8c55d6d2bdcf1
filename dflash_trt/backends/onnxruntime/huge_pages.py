"""What a session packs its weights into, moved to the large memory pages of Linux.

A step of one row reads every weight once. In pages of 4 KiB it waits for the place of each page as
well: steps of one row took a fifth to a third longer, and how much longer depended on where the
pages happened to lie (docs/design/graphs.md). malloc asks for large pages only if told so before
the process begins, so they are asked for afterwards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")

# linux/mman.h; the second moves what is there at once, since Linux 6.1.
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25

_Range = tuple[int, int]


@contextmanager
def in_huge_pages() -> Iterator[None]:
    """Moves the anonymous memory that is mapped meanwhile to large pages, as far as there are any.

    Nothing changes but speed, and nothing is raised: kernels may lack them or refuse. What other
    threads map meanwhile is moved as well, and fills its pages.
    """
    size = _page_size()
    before = _mapped() if size else None
    yield
    after = _mapped() if size else None
    if before is not None and after is not None:
        libc = ctypes.CDLL(None)
        for start, end in _without(after, before):
            first, last = -(-start // size) * size, end // size * size
            if first < last:
                place = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
                libc.madvise(*place, _MADV_HUGEPAGE)
                libc.madvise(*place, _MADV_COLLAPSE)


def _page_size() -> int:
    """Bytes of a large page; 0 where there are none, or none are wanted."""
    try:
        if "[never]" in (_LARGE_PAGES / "enabled").read_text(encoding="ascii"):
            return 0
        return int((_LARGE_PAGES / "hpage_pmd_size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _mapped() -> list[_Range] | None:
    """Where this process has writable memory of no file, ascending: [start, end)."""
    found = []
    try:
        lines = _MAPS.read_bytes().split(b"\n")  # a file's name may hold whatever else ends lines
    except OSError:
        return None
    for line in filter(None, lines):
        addresses, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights == b"rw-p" and (not name or name[0] == b"[heap]"):
            start, end = (int(address, 16) for address in addresses.split(b"-"))
            found.append((start, end))
    return found


def _without(ranges: list[_Range], taken: list[_Range]) -> Iterator[_Range]:
    """The parts of `ranges` that lie in none of `taken`; both ascending, neither overlapping."""
    rest = iter(taken)
    one = next(rest, None)
    for start, end in ranges:
        while one is not None and one[0] < end:
            if start < one[0]:
                yield start, one[0]
            start = max(start, one[1])
            if one[1] > end:
                break
            one = next(rest, None)
        if start < end:
            yield start, end

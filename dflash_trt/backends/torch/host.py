"""The CPU behind a device's interface: everything happens at once, and graphs are lists of work."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from typing import Any

import numpy as np

from dflash_trt.core.free_memory import available_memory
from dflash_trt.errors import DflashError
from dflash_trt.hardware.device import SMALLER, Device, HostBytes, align

Work = Callable[[], None]


class HostDevice(Device):
    """Memory of this process. What is enqueued is done when the call returns, unless recorded."""

    def __init__(self) -> None:
        self.count, self.name, self.arch = 1, f"this machine's CPU ({platform.machine()})", "cpu"
        self.total_bytes = available_memory() or 0
        self._blocks: dict[int, HostBytes] = {}
        self._recording: list[Work] | None = None
        self._recorded: dict[int, list[Work]] = {}
        self._handle = 0

    @property
    def stream(self) -> int:
        return 0

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "arch": self.arch}

    def free_bytes(self) -> int:
        free = available_memory()
        return 1 << 62 if free is None else free

    def submit(self, work: Work) -> None:
        """Does `work`, or records it."""
        if self._recording is None:
            work()
        else:
            self._recording.append(work)

    def allocate(self, size: int, purpose: str, *, fix: str = SMALLER) -> int:
        free = self.free_bytes()
        if size > free:
            what = f"{purpose} of {size:,} bytes do not fit {self.name}: {free:,} are free"
            raise DflashError(what, fix=fix)
        return int(self.allocate_host(size).ctypes.data)

    def free(self, address: int) -> None:
        del self._blocks[address]

    def allocate_host(self, size: int) -> HostBytes:
        block = np.zeros(max(size, 1) + align(1), np.uint8)
        begin = -block.ctypes.data % align(1)
        memory: HostBytes = block[begin : begin + max(size, 1)]
        self._blocks[memory.ctypes.data] = memory
        return memory

    def free_host(self, memory: HostBytes) -> None:
        del self._blocks[memory.ctypes.data]

    def copy_rows(
        self, destination: int, source: int, *, pitch: int, width: int, rows: int
    ) -> None:
        for at in range(0, rows * pitch, pitch):
            self.copy(destination + at, source + at, width)

    def clear(self, address: int, size: int) -> None:
        self.submit(lambda: _ignore(ctypes.memset(address, 0, size)))

    def clear_rows(self, address: int, *, pitch: int, width: int, rows: int) -> None:
        for at in range(0, rows * pitch, pitch):
            self.clear(address + at, width)

    def synchronize(self) -> None:
        """Nothing is under way."""

    def make_event(self) -> int:
        return 0

    def record(self, event: int) -> None:
        """Whatever comes before has been done."""

    def wait(self, event: int) -> None:
        """Whatever was recorded has been done."""

    def begin_capture(self) -> None:
        self._recording = []

    def end_capture(self) -> int:
        work, self._recording = self._recording, None
        assert work is not None
        self._handle += 1
        self._recorded[self._handle] = work
        return self._handle

    def abandon_capture(self) -> None:
        self._recording = None

    def launch(self, graph: int) -> None:
        for work in self._recorded[graph]:
            work()

    def destroy_graph(self, graph: int) -> None:
        del self._recorded[graph]

    def close(self) -> None:
        self._blocks.clear()
        self._recorded.clear()

    def _copy(self, destination: int, source: int, size: int, kind: str) -> None:
        self.submit(lambda: _ignore(ctypes.memmove(destination, source, size)))


def _ignore(result: object) -> None:
    """Drops what a call returns, as work returns nothing."""

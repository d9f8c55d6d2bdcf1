"""The CPU behind CUDA's runtime interface: everything is done at once, graphs are lists of work."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from dflash_trt.core.free_memory import available_memory
from dflash_trt.hardware.device import HostBytes, align

HostWork = Callable[[], object]


class HostCuda:
    """What Device calls of cuda-python, over this process's memory.

    Functions that are not here have nothing to do: streams are in order, events have passed.
    """

    cudaError_t = SimpleNamespace(cudaSuccess=0)  # noqa: N815
    cudaStreamNonBlocking = cudaHostAllocDefault = cudaEventDisableTiming = 0  # noqa: N815
    cudaMemcpyKind = cudaStreamCaptureMode = SimpleNamespace(  # noqa: N815
        cudaMemcpyHostToDevice=1,
        cudaMemcpyDeviceToHost=2,
        cudaMemcpyDeviceToDevice=3,
        cudaStreamCaptureModeThreadLocal=1,
    )

    def __init__(self) -> None:
        self._blocks: dict[int, HostBytes] = {}
        self._graphs: dict[int, list[HostWork]] = {}
        self._recording: list[HostWork] | None = None
        move, fill = ctypes.memmove, ctypes.memset

        def each_row(rows: int, work: Callable[[int], object]) -> tuple[int, None]:
            return self.submit(lambda: [work(row) for row in range(rows)])

        self._functions: dict[str, Callable[..., tuple[Any, ...]]] = {
            "cudaGetDeviceProperties": lambda device: (0, self._properties()),
            "cudaMemGetInfo": lambda: (0, *[available_memory() or 1 << 62] * 2),
            "cudaMalloc": self._allocate,
            "cudaHostAlloc": lambda size, flags: self._allocate(size),
            "cudaFree": lambda address: (0, self._blocks.pop(address)),
            "cudaFreeHost": lambda address: (0, self._blocks.pop(address)),
            "cudaMemcpyAsync": lambda to, start, size, kind, stream: self.submit(
                lambda: move(to, start, size)
            ),
            "cudaMemcpy2DAsync": lambda to, to_pitch, start, pitch, width, rows, kind, stream: (
                each_row(rows, lambda row: move(to + row * to_pitch, start + row * pitch, width))
            ),
            "cudaMemsetAsync": lambda to, value, size, stream: self.submit(
                lambda: fill(to, value, size)
            ),
            "cudaMemset2DAsync": lambda to, pitch, value, width, rows, stream: each_row(
                rows, lambda row: fill(to + row * pitch, value, width)
            ),
            "cudaStreamBeginCapture": lambda stream, mode: self._begin(),
            "cudaStreamEndCapture": lambda stream: (0, self._end()),
            "cudaGraphInstantiate": lambda graph, flags: (0, graph),
            "cudaGraphExecDestroy": lambda graph: (0, self._graphs.pop(graph)),
            "cudaGraphLaunch": lambda graph, stream: (0, [one() for one in self._graphs[graph]]),
        }

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        return self._functions.get(name, lambda *arguments: (0, 1))

    def submit(self, work: HostWork) -> tuple[int, None]:
        """Does `work`, or records it."""
        if self._recording is None:
            work()
        else:
            self._recording.append(work)
        return 0, None

    def _properties(self) -> SimpleNamespace:
        name = f"this machine's CPU ({platform.machine()})"
        return SimpleNamespace(name=name, major=0, minor=0, totalGlobalMem=available_memory() or 0)

    def _allocate(self, size: int) -> tuple[int, int]:
        block = np.zeros(size + align(1), np.uint8)
        address = align(block.ctypes.data)
        self._blocks[address] = block
        return 0, address

    def _begin(self) -> tuple[int, None]:
        self._recording = []
        return 0, None

    def _end(self) -> int:
        assert self._recording is not None
        handle = max(self._graphs, default=0) + 1
        self._graphs[handle], self._recording = self._recording, None
        return handle

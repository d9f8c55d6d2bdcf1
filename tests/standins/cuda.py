"""A CUDA device made of host memory, behind cuda-python's own signatures.

Work is queued and runs when it is waited for, up to the event that is waited for, so that whoever
reads too early reads garbage: that is what a download's destination holds until then. Streams are
not ordered among each other: another's work, the default stream's too, comes last of all. What is
uploaded must stay as it is until it has been. Every address is checked against what is allocated,
every call against the real function's signature; names that the bindings do not have do not exist
here either.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python (the rtx extra) is not installed")

from cuda.bindings import runtime as real

OK = real.cudaError_t.cudaSuccess
INVALID = real.cudaError_t.cudaErrorInvalidValue
GARBAGE = 0xC3

Operation = Callable[[], None]


class FakeCuda:
    """`fail` names functions that return an error the next time they are called."""

    def __init__(
        self,
        arch: tuple[int, int] = (12, 0),
        *,
        count: int = 1,
        total: int = 1 << 30,
        name: str = "Stand-in GPU",
        driver: int = 13040,
    ) -> None:
        self.arch, self.count, self.total = arch, count, total
        self.name, self.driver = name, driver
        self.used: set[str] = set()
        self.fail: dict[str, Any] = {}
        self.memory: dict[int, np.ndarray] = {}
        self.host: dict[int, np.ndarray] = {}
        self.queue: list[tuple[int, Operation]] = []
        self.recording: list[Operation] | None = None
        self._recorded_stream = 0
        self.graphs: dict[int, list[Operation]] = {}
        self.executables: dict[int, list[Operation]] = {}
        self.streams: set[int] = set()
        self.events: dict[int, tuple[int, Operation] | None] = {}
        self.launches = self.copies = 0
        self._next = 100

    def __getattr__(self, name: str) -> Any:
        implementation = getattr(Functions, name, None)
        if implementation is None:
            assert (
                not name.startswith("cuda")
                or not callable(getattr(real, name))
                or isinstance(getattr(real, name), type)
            ), f"{name} has no stand-in"
            return getattr(real, name)

        def call(*arguments: Any) -> Any:
            inspect.signature(getattr(real, name)).bind(*arguments)
            self.used.add(name)
            if name in self.fail:
                return (self.fail.pop(name), *([None] * 2))[: 3 if "Mem" in name else 2]
            return implementation(self, *arguments)

        return call

    @property
    def is_clean(self) -> bool:
        """Nothing is left of it all."""
        left = (self.memory, self.host, self.executables, self.graphs, self.streams, self.events)
        return not any(left)

    def handle(self) -> int:
        self._next += 1
        return self._next

    def submit(self, stream: Any, operation: Operation) -> None:
        """Queues `operation` in `stream`, or records it there."""
        if self.recording is not None and int(stream) == self._recorded_stream:
            self.recording.append(operation)
        else:
            self.queue.append((int(stream), operation))

    def submit_rows(
        self,
        stream: Any,
        work: Callable[..., Any],
        width: int,
        rows: int,
        *places: tuple[int, int],
    ) -> tuple[Any]:
        """Queues `work` on the addresses of each row; `places` are (address, pitch)."""
        if not all(self.owns(address, (rows - 1) * pitch + width) for address, pitch in places):
            return (INVALID,)

        def run() -> None:
            for row in range(rows):
                work(*(address + row * pitch for address, pitch in places))

        self.submit(stream, run)
        return (OK,)

    def run(self, stream: int = 0, last: Operation | None = None) -> None:
        """Runs what is queued in `stream`, up to `last` or else what is in the others as well."""
        for entry in sorted(self.queue, key=lambda entry: entry[0] != stream):
            self.queue.remove(entry)
            entry[1]()
            if entry[1] is last:
                break

    def owns(self, address: int, size: int, *, host: bool = False) -> bool:
        arrays = self.host if host else self.memory
        return any(
            start <= address and address + size <= start + array.nbytes
            for start, array in arrays.items()
        )

    def array(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Device memory as an array."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        assert self.owns(address, size), f"{size} bytes at {address} are nobody's"
        raw = (ctypes.c_uint8 * size).from_address(address)
        return np.frombuffer(raw, dtype).reshape(shape)

    def allocate(self, store: dict[int, np.ndarray], size: int) -> int:
        backing = np.full(size + 512, GARBAGE, np.uint8)
        address = -(-backing.ctypes.data // 256) * 256
        start = address - backing.ctypes.data
        store[address] = backing[start : start + size]
        return address


class Functions:
    """The functions; `self` is the FakeCuda."""

    def cudaGetDeviceCount(self: FakeCuda) -> Any:  # noqa: N802
        return OK, self.count

    def cudaSetDevice(self: FakeCuda, device: int) -> Any:  # noqa: N802
        return (OK if device < self.count else INVALID,)

    def cudaGetDeviceProperties(self: FakeCuda, device: int) -> Any:  # noqa: N802
        major, minor = self.arch
        properties = SimpleNamespace(
            name=self.name.encode(), major=major, minor=minor, totalGlobalMem=self.total
        )
        assert all(hasattr(real.cudaDeviceProp, name) for name in vars(properties))
        return OK, properties

    def cudaDriverGetVersion(self: FakeCuda) -> Any:  # noqa: N802
        return OK, self.driver

    def cudaMemGetInfo(self: FakeCuda) -> Any:  # noqa: N802
        return OK, self.total - sum(array.nbytes for array in self.memory.values()), self.total

    def cudaGetErrorString(self: FakeCuda, error: Any) -> Any:  # noqa: N802
        return real.cudaGetErrorString(error)

    def cudaStreamCreateWithFlags(self: FakeCuda, flags: int) -> Any:  # noqa: N802
        stream = self.handle()
        self.streams.add(stream)
        return OK, real.cudaStream_t(stream)

    def cudaStreamDestroy(self: FakeCuda, stream: Any) -> Any:  # noqa: N802
        self.streams.remove(int(stream))
        return (OK,)

    def cudaStreamSynchronize(self: FakeCuda, stream: Any) -> Any:  # noqa: N802
        assert int(stream) in self.streams
        if self.recording is not None:
            return (real.cudaError_t.cudaErrorStreamCaptureUnsupported,)
        self.run(int(stream))
        return (OK,)

    def cudaEventCreateWithFlags(self: FakeCuda, flags: int) -> Any:  # noqa: N802
        assert flags == real.cudaEventDisableTiming
        event = self.handle()
        self.events[event] = None
        return OK, real.cudaEvent_t(event)

    def cudaEventDestroy(self: FakeCuda, event: Any) -> Any:  # noqa: N802
        del self.events[int(event)]
        return (OK,)

    def cudaEventRecord(self: FakeCuda, event: Any, stream: Any) -> Any:  # noqa: N802
        assert int(stream) in self.streams and self.recording is None

        def reached() -> None:
            pass

        self.events[int(event)] = int(stream), reached
        self.submit(stream, reached)
        return (OK,)

    def cudaEventSynchronize(self: FakeCuda, event: Any) -> Any:  # noqa: N802
        reached = self.events[int(event)]
        assert reached is not None, "an event that was never recorded"
        if reached in self.queue:
            self.run(*reached)
        return (OK,)

    def cudaMalloc(self: FakeCuda, size: int) -> Any:  # noqa: N802
        assert self.recording is None, "allocation while capturing"
        return OK, self.allocate(self.memory, size)

    def cudaFree(self: FakeCuda, address: int) -> Any:  # noqa: N802
        assert not self.queue, "memory freed while work is queued"
        del self.memory[address]
        return (OK,)

    def cudaHostAlloc(self: FakeCuda, size: int, flags: int) -> Any:  # noqa: N802
        return OK, self.allocate(self.host, size)

    def cudaFreeHost(self: FakeCuda, address: int) -> Any:  # noqa: N802
        assert not self.queue, "memory freed while work is queued"
        self.host.pop(address)[...] = GARBAGE
        return (OK,)

    def cudaMemcpyAsync(  # noqa: N802
        self: FakeCuda, destination: int, source: int, size: int, kind: Any, stream: Any
    ) -> Any:
        kinds = real.cudaMemcpyKind
        to_host, from_host = (
            kind == one for one in (kinds.cudaMemcpyDeviceToHost, kinds.cudaMemcpyHostToDevice)
        )
        assert to_host or from_host or kind == kinds.cudaMemcpyDeviceToDevice
        if not self.owns(destination, size, host=to_host):
            return (INVALID,)
        if not self.owns(source, size, host=from_host):
            return (INVALID,)
        if to_host and self.recording is None:
            ctypes.memset(destination, GARBAGE, size)
        sent = ctypes.string_at(source, size) if from_host else None

        def copy() -> None:
            assert sent in (None, ctypes.string_at(source, size)), "overwritten on its way"
            self.copies += 1
            ctypes.memmove(destination, source, size)

        self.submit(stream, copy)
        return (OK,)

    def cudaMemcpy2DAsync(  # noqa: N802
        self: FakeCuda,
        destination: int,
        to_pitch: int,
        source: int,
        from_pitch: int,
        width: int,
        rows: int,
        kind: Any,
        stream: Any,
    ) -> Any:
        assert kind == real.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        if width > min(to_pitch, from_pitch):
            return (real.cudaError_t.cudaErrorInvalidPitchValue,)
        places = (destination, to_pitch), (source, from_pitch)
        return self.submit_rows(
            stream, lambda *row: ctypes.memmove(*row, width), width, rows, *places
        )

    def cudaMemsetAsync(  # noqa: N802
        self: FakeCuda, address: int, value: int, size: int, stream: Any
    ) -> Any:
        place = (address, size)
        return self.submit_rows(stream, lambda row: ctypes.memset(row, value, size), size, 1, place)

    def cudaMemset2DAsync(  # noqa: N802
        self: FakeCuda, address: int, pitch: int, value: int, width: int, rows: int, stream: Any
    ) -> Any:
        if width > pitch:
            return (INVALID,)
        place = (address, pitch)
        return self.submit_rows(
            stream, lambda row: ctypes.memset(row, value, width), width, rows, place
        )

    def cudaStreamBeginCapture(self: FakeCuda, stream: Any, mode: Any) -> Any:  # noqa: N802
        assert isinstance(mode, real.cudaStreamCaptureMode) and self.recording is None
        self.recording, self._recorded_stream = [], int(stream)
        return (OK,)

    def cudaStreamEndCapture(self: FakeCuda, stream: Any) -> Any:  # noqa: N802
        assert self.recording is not None and int(stream) == self._recorded_stream
        graph = self.handle()
        self.graphs[graph], self.recording = self.recording, None
        return OK, real.cudaGraph_t(graph)

    def cudaGraphInstantiate(self: FakeCuda, graph: Any, flags: int) -> Any:  # noqa: N802
        executable = self.handle()
        self.executables[executable] = self.graphs[int(graph)]
        return OK, real.cudaGraphExec_t(executable)

    def cudaGraphDestroy(self: FakeCuda, graph: Any) -> Any:  # noqa: N802
        del self.graphs[int(graph)]
        return (OK,)

    def cudaGraphExecDestroy(self: FakeCuda, executable: Any) -> Any:  # noqa: N802
        del self.executables[int(executable)]
        return (OK,)

    def cudaGraphLaunch(self: FakeCuda, executable: Any, stream: Any) -> Any:  # noqa: N802
        self.launches += 1
        self.queue += [(int(stream), one) for one in self.executables[int(executable)]]
        return (OK,)

"""One CUDA device through cuda-python: memory, a stream, graphs; every failure is one line.

Everything asynchronous goes to the device's own stream, in order. Addresses are plain integers;
host memory is pinned, which is what lets its copies run asynchronously and be captured.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.errors import DflashError, one_line

MODULE = "cuda.bindings.runtime"
INSTALL = "pip install 'cuda-python>=13.0'"
SMALLER = "build with a smaller --max-batch or --max-seq-len"
# What TensorRT wants tensors aligned to; cudaMalloc gives at least as much.
ALIGNMENT = 256

HostBytes = npt.NDArray[np.uint8]


def align(size: int) -> int:
    """`size` rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def load_cuda() -> Any:
    """cuda-python's runtime bindings.

    Raises:
        DflashError: not installed.
    """
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        raise DflashError(
            f"cuda-python is not installed ({one_line(error, 80)})", fix=INSTALL
        ) from error


def has_driver() -> bool:
    """Whether this machine seems to have NVIDIA's driver, without which there is no GPU."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def driver_cuda(cuda: Any = None) -> tuple[int, int]:
    """The newest CUDA version that the driver supports, as (13, 0); (0, 0) without a driver.

    Raises:
        DflashError: no bindings.
    """
    _, number = (load_cuda() if cuda is None else cuda).cudaDriverGetVersion()
    return number // 1000, number % 1000 // 10


class Device:
    """The first CUDA device that the process may see (CUDA_VISIBLE_DEVICES chooses it).

    `count` is how many there are.

    Args:
        cuda: the bindings; None imports them.

    Raises:
        DflashError: there is no such device, no driver or no bindings.
    """

    def __init__(self, cuda: Any = None) -> None:
        self._cuda = load_cuda() if cuda is None else cuda
        self._memory: set[int] = set()
        self._host: dict[int, HostBytes] = {}
        self._graphs: dict[int, Any] = {}
        self._events: dict[int, Any] = {}
        self._stream: Any = None
        try:
            (count,) = self._call("cudaGetDeviceCount")
        except DflashError as error:
            # Without a driver CUDA says that it is too old.
            has_any = driver_cuda(self._cuda) > (0, 0)
            reason = error.what.partition(": ")[2] if has_any else "this machine has no driver"
            raise _no_device(reason) from error
        if not count:
            raise _no_device("none is visible to this process")
        self.count = int(count)
        self._call("cudaSetDevice", 0)
        (properties,) = self._call("cudaGetDeviceProperties", 0)
        name = properties.name
        self.name = (name.decode() if isinstance(name, bytes) else str(name)).rstrip("\0")
        self.arch = f"sm_{properties.major}{properties.minor}"
        self.total_bytes = int(properties.totalGlobalMem)
        # Blocking, as the default stream is no part of this.
        (self._stream,) = self._call(
            "cudaStreamCreateWithFlags", int(self._cuda.cudaStreamNonBlocking)
        )

    @property
    def stream(self) -> int:
        """The stream's handle."""
        return int(self._stream)

    def describe(self) -> dict[str, Any]:
        """The device, for a record."""
        return {
            "name": self.name,
            "arch": self.arch,
            "memory_gb": round(self.total_bytes / 1e9, 1),
            "driver_cuda": "{}.{}".format(*driver_cuda(self._cuda)),
        }

    def free_bytes(self) -> int:
        """Device memory that is free now."""
        free, _ = self._call("cudaMemGetInfo")
        return int(free)

    def allocate(self, size: int, purpose: str, *, fix: str = SMALLER) -> int:
        """Address of `size` bytes of device memory.

        Raises:
            DflashError: they do not fit; names `purpose` and the sizes, and says `fix`.
        """
        free = self.free_bytes()
        if size > free:
            what = f"{purpose} of {size:,} bytes do not fit {self.name}: {free:,} are free"
            raise DflashError(what, fix=fix)
        (address,) = self._call("cudaMalloc", max(size, 1))
        self._memory.add(int(address))
        return int(address)

    def free(self, address: int) -> None:
        """Frees what `allocate` gave; the stream must be done with it."""
        self._memory.remove(address)
        self._call("cudaFree", address)

    def allocate_host(self, size: int) -> HostBytes:
        """Zeroed pinned host memory of `size` bytes."""
        (address,) = self._call("cudaHostAlloc", max(size, 1), int(self._cuda.cudaHostAllocDefault))
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * max(size, 1)).from_address(int(address)))
        memory[...] = 0
        self._host[int(address)] = memory
        return memory

    def free_host(self, memory: HostBytes) -> None:
        """Frees what `allocate_host` gave; nobody may hold views of it."""
        address = int(memory.ctypes.data)
        del self._host[address]
        self._call("cudaFreeHost", address)

    def upload(self, address: int, source: HostBytes) -> None:
        """Copies pinned host memory to the device, in stream order."""
        self._copy(address, int(source.ctypes.data), source.nbytes, "cudaMemcpyHostToDevice")

    def download(self, destination: HostBytes, address: int) -> None:
        """Copies device memory to pinned host memory, in stream order."""
        size = destination.nbytes
        self._copy(int(destination.ctypes.data), address, size, "cudaMemcpyDeviceToHost")

    def copy(self, destination: int, source: int, size: int) -> None:
        """Copies device memory to device memory, in stream order; the two do not overlap."""
        self._copy(destination, source, size, "cudaMemcpyDeviceToDevice")

    def copy_rows(
        self, destination: int, source: int, *, pitch: int, width: int, rows: int
    ) -> None:
        """Copies the first `width` bytes of each of `rows` rows that lie `pitch` bytes apart."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        places = (destination, pitch, source, pitch)
        self._call("cudaMemcpy2DAsync", *places, width, rows, kind, self._stream)

    def clear(self, address: int, size: int) -> None:
        """Zeroes device memory, in stream order."""
        self._call("cudaMemsetAsync", address, 0, size, self._stream)

    def clear_rows(self, address: int, *, pitch: int, width: int, rows: int) -> None:
        """Zeroes the first `width` bytes of each of `rows` rows that lie `pitch` bytes apart."""
        self._call("cudaMemset2DAsync", address, pitch, 0, width, rows, self._stream)

    def synchronize(self) -> None:
        """Waits for everything in the stream.

        Raises:
            DflashError: something in it failed, a kernel that TensorRT launched included.
        """
        self._call("cudaStreamSynchronize", self._stream)

    def make_event(self) -> int:
        """A handle for `record` and `wait`; `close` destroys it."""
        (event,) = self._call("cudaEventCreateWithFlags", int(self._cuda.cudaEventDisableTiming))
        handle = int(event)
        self._events[handle] = event
        return handle

    def record(self, event: int) -> None:
        """Puts `event` behind everything that is in the stream now, wherever it was before."""
        self._call("cudaEventRecord", self._events[event], self._stream)

    def wait(self, event: int) -> None:
        """Waits for everything before the place where `event` was recorded last, and no more.

        Raises:
            DflashError: something in the stream failed.
        """
        self._call("cudaEventSynchronize", self._events[event])

    def begin_capture(self) -> None:
        """From here on the stream records instead of running."""
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self._stream, mode)

    def end_capture(self) -> int:
        """Ends recording; a handle for `launch` of what was recorded.

        Raises:
            DflashError: something recorded cannot be part of a graph. The stream runs again.
        """
        (graph,) = self._call("cudaStreamEndCapture", self._stream)
        try:
            (executable,) = self._call("cudaGraphInstantiate", graph, 0)
        finally:
            self._call("cudaGraphDestroy", graph)
        handle = int(executable)
        self._graphs[handle] = executable
        return handle

    def abandon_capture(self) -> None:
        """Ends a recording that failed half-way; the stream runs again."""
        error, graph = self._cuda.cudaStreamEndCapture(self._stream)
        if error == self._cuda.cudaError_t.cudaSuccess:
            self._call("cudaGraphDestroy", graph)

    def launch(self, graph: int) -> None:
        """Runs what was recorded, in stream order."""
        self._call("cudaGraphLaunch", self._graphs[graph], self._stream)

    def destroy_graph(self, graph: int) -> None:
        self._call("cudaGraphExecDestroy", self._graphs.pop(graph))

    def close(self) -> None:
        """Waits, then frees everything; the device cannot be used afterwards. Safe to repeat."""
        if self._stream is None:
            return
        try:
            self.synchronize()
        finally:  # a broken device reports its failure once, at the first call
            cuda, stream, self._stream = self._cuda, self._stream, None
            for held, destroy in (
                (self._graphs.values(), cuda.cudaGraphExecDestroy),
                (self._events.values(), cuda.cudaEventDestroy),
                (self._memory, cuda.cudaFree),
                (self._host, cuda.cudaFreeHost),
            ):
                for one in held:
                    destroy(one)
            cuda.cudaStreamDestroy(stream)

    def _copy(self, destination: int, source: int, size: int, kind: str) -> None:
        direction = getattr(self._cuda.cudaMemcpyKind, kind)
        self._call("cudaMemcpyAsync", destination, source, size, direction, self._stream)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """Calls the runtime; what it returns behind the error code."""
        error, *results = getattr(self._cuda, name)(*arguments)
        if error != self._cuda.cudaError_t.cudaSuccess:
            _, text = self._cuda.cudaGetErrorString(error)
            reason = text.decode() if isinstance(text, bytes) else str(text)
            raise DflashError(f"{name}: {one_line(reason)}")
        return tuple(results)


def _no_device(reason: str) -> DflashError:
    return DflashError(
        f"no CUDA device: {reason}", fix="engines run on an NVIDIA GPU; build with --executor cpu"
    )

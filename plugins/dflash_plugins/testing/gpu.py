"""Launches the machine code that TensorRT would embed, with the arguments that TensorRT would pass.

Not run on a GPU yet: its host code is tested against a stand-in for the driver.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dflash_plugins.compile import CompiledKernel, compile_kernel
from dflash_plugins.operation import (
    Attributes,
    Case,
    KernelSpec,
    Launch,
    Operation,
    TensorSpec,
    kernel_spec,
)
from dflash_plugins.testing.guarded import Arrays, Buffers, run_guarded
from dflash_plugins.testing.numeric import Array
from dflash_trt.errors import DflashError, one_line
from dflash_trt.hardware.device import Device
from dflash_trt.hardware.kernels import kernel_arches

WARM_UP_CALLS, TIMED_CALLS = 5, 30
# So many bytes are overwritten before each timed call, so that its data is not in the L2 cache.
FLUSHED_BYTES = 1 << 28
COPIED_BYTES = 1 << 30

Call = Callable[[], Any]


def load_driver() -> Any:
    """cuda-python's driver bindings."""
    return importlib.import_module("cuda.bindings.driver")


class KernelLauncher:
    """Compiles kernels for one architecture and starts them.

    Args:
        driver: the bindings of CUDA's driver; a context must be current.
        arch: such as "sm_90a".
        folder: where compiled kernels are kept.
    """

    def __init__(self, driver: Any, arch: str, folder: Path) -> None:
        self._driver, self._arch, self._folder = driver, arch, folder
        self._loaded: dict[KernelSpec, tuple[Any, CompiledKernel]] = {}

    def launch(
        self, spec: KernelSpec, launch: Launch, addresses: Sequence[int], stream: int
    ) -> None:
        """Enqueues `launch` of the kernel `spec`; `addresses` are of all inputs, then outputs.

        Raises:
            DflashError: the driver refuses the machine code or the launch.
        """
        function, kernel = self._load(spec)
        pointers = iter(addresses)
        extras = iter(launch.extras)
        kinds = [kind for _, kind in spec.parameters]
        values = tuple(next(extras if kind == "i32" else pointers) for kind in kinds)
        types = tuple(ctypes.c_int32 if kind == "i32" else ctypes.c_void_p for kind in kinds)
        sizes = (*launch.grid, kernel.threads, 1, 1, kernel.shared_bytes)
        self._call("cuLaunchKernel", function, *sizes, stream, (values, types), 0)

    def _load(self, spec: KernelSpec) -> tuple[Any, CompiledKernel]:
        if spec not in self._loaded:
            kernel = compile_kernel(spec, self._arch, self._folder)
            (module,) = self._call("cuModuleLoadData", kernel.cubin)
            (function,) = self._call("cuModuleGetFunction", module, kernel.name.encode())
            # Static and dynamic memory count together; to opt in where they just fit does no harm.
            plain = kernel_arches()[self._arch].plain_shared_bytes
            if kernel.resources.shared_bytes >= plain:
                attribute = self._driver.CUfunction_attribute
                kind = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._call("cuFuncSetAttribute", function, kind, kernel.shared_bytes)
            self._loaded[spec] = function, kernel
        return self._loaded[spec]

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        error, *results = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            _, text = self._driver.cuGetErrorString(error)
            reason = text.decode() if isinstance(text, bytes) else str(text)
            raise DflashError(f"{name}: {one_line(reason)}")
        return tuple(results)


class GpuRunner:
    """Runs operations over host arrays, in guarded memory of the device."""

    def __init__(self, device: Device, launcher: KernelLauncher) -> None:
        self._device, self._launcher = device, launcher

    def run(
        self, operation: str, inputs: Arrays, attributes: Attributes, tactic: int = 0
    ) -> dict[str, Array]:
        """Outputs of `operation` over `inputs` (aliased ones are copies).

        Raises:
            AssertionError: the kernel wrote outside of its outputs.
            DflashError: the CUDA driver reported an error.
        """
        return run_guarded(operation, inputs, attributes, tactic, self._launch)

    def _launch(
        self, operation: Operation, launch: Launch, specs: Mapping[str, TensorSpec], held: Buffers
    ) -> None:
        buffers = {id(buffer): buffer for buffer in held.values()}
        addresses, copies = {}, {}
        try:
            for key, buffer in buffers.items():
                size = buffer.memory.size
                addresses[key] = self._device.allocate(size, "a tensor of the check")
                copies[key] = self._device.allocate_host(size)
                copies[key][...] = buffer.memory
                self._device.upload(addresses[key], copies[key])
            names = (*operation.inputs, *operation.outputs)
            first = [addresses[id(held[name])] + held[name].offset for name in names]
            spec = kernel_spec(operation, specs, launch)
            self._launcher.launch(spec, launch, first, self._device.stream)
            self._device.synchronize()  # until then the uploads may still read the copies
            for key in buffers:
                self._device.download(copies[key], addresses[key])
            self._device.synchronize()
            for key, buffer in buffers.items():
                buffer.memory[...] = copies[key]
        finally:
            with suppress(DflashError):  # the first error is already on its way
                self._device.synchronize()
            for address in addresses.values():
                self._device.free(address)
            for memory in copies.values():
                self._device.free_host(memory)


class TorchRunner:
    """Launches cases over PyTorch tensors and times work on PyTorch's current stream."""

    def __init__(self, torch: Any, launcher: KernelLauncher) -> None:
        self._torch, self._launcher = torch, launcher
        self._flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")

    def upload(self, arrays: Arrays) -> dict[str, Any]:
        """Copies arrays to the GPU."""
        return to_torch(self._torch, arrays, "cuda")

    def measure(
        self,
        case: Case,
        tensors: Mapping[str, Any],
        rivals: Mapping[str, Call],
        required_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Seconds of `case` and of its rivals; bytes/s too if `required_bytes` is given."""
        work, _ = self.prepare(case, tensors)
        seconds = self.seconds(work)
        row = {"operation": case.operation.kernel, "case": case.name, "seconds": seconds}
        if required_bytes is not None:
            row["required_bytes"] = required_bytes
            row["bytes_per_second"] = required_bytes / seconds
        return row | {"rival_seconds": {name: self.seconds(one) for name, one in rivals.items()}}

    def prepare(
        self, case: Case, tensors: Mapping[str, Any], tactic: int = 0
    ) -> tuple[Call, dict[str, Any]]:
        """A function that launches `case` over `tensors`, and the outputs that it writes."""
        operation, launch = case.operation, case.launch(tactic)
        outputs = {
            name: tensors[operation.aliases[name]]
            if name in operation.aliases
            else self._torch.empty(spec.shape, dtype=torch_type(self._torch, spec), device="cuda")
            for name, spec in case.outputs.items()
        }
        known = {**tensors, **outputs}
        spec = case.kernel_spec(tactic)
        addresses = [known[name].data_ptr() for name in (*operation.inputs, *operation.outputs)]

        def work() -> None:
            stream = self._torch.cuda.current_stream().cuda_stream
            self._launcher.launch(spec, launch, addresses, stream)

        return work, outputs

    def seconds(self, work: Call) -> float:
        """The median seconds of one call of `work` with a cold L2 cache."""
        cuda = self._torch.cuda
        for _ in range(WARM_UP_CALLS):
            work()
        events = [(cuda.Event(True), cuda.Event(True)) for _ in range(TIMED_CALLS)]
        for begin, end in events:
            self._flushed.zero_()
            begin.record()
            work()
            end.record()
        cuda.synchronize()
        milliseconds = [float(begin.elapsed_time(end)) for begin, end in events]
        return median(milliseconds) / 1e3

    def copy_bytes_per_second(self) -> float:
        """Memory bandwidth of a large copy: bytes read plus bytes written, per second."""
        source = self._torch.empty(COPIED_BYTES, dtype=self._torch.uint8, device="cuda")
        destination = self._torch.empty_like(source)
        return 2 * COPIED_BYTES / self.seconds(lambda: destination.copy_(source))


def torch_type(torch: Any, spec: TensorSpec) -> Any:
    """PyTorch's element type of `spec`; it has the same name as NumPy's."""
    return getattr(torch, spec.dtype.numpy.name)


def to_torch(torch: Any, arrays: Arrays, device: str) -> dict[str, Any]:
    """Copies arrays to `device` bit for bit, types that NumPy lacks (bf16, FP8) included."""
    tensors = {}
    for name, array in arrays.items():
        bits = torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).reshape(-1).copy())
        kind = torch_type(torch, TensorSpec.of(array))
        tensors[name] = bits.view(kind).reshape(array.shape).to(device)
    return tensors

"""Launches the machine code that TensorRT would embed, with the arguments that TensorRT would pass.

Not run on a GPU yet: its host code is tested against a stand-in for the driver.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
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
        function, kernel = self.load(spec)
        pointers = iter(addresses)
        extras = iter(launch.extras)
        kinds = [kind for _, kind in spec.parameters]
        values = tuple(next(extras if kind == "i32" else pointers) for kind in kinds)
        types = tuple(ctypes.c_int32 if kind == "i32" else ctypes.c_void_p for kind in kinds)
        sizes = (*launch.grid, kernel.threads, 1, 1, kernel.shared_bytes)
        self.call("cuLaunchKernel", function, *sizes, stream, (values, types), 0)

    def load(self, spec: KernelSpec) -> tuple[Any, CompiledKernel]:
        """The kernel on the device, compiled if need be; DflashError as `launch`."""
        if spec not in self._loaded:
            kernel = compile_kernel(spec, self._arch, self._folder)
            (module,) = self.call("cuModuleLoadData", kernel.cubin)
            (function,) = self.call("cuModuleGetFunction", module, kernel.name.encode())
            # Static and dynamic memory count together; to opt in where they just fit does no harm.
            plain = kernel_arches()[self._arch].plain_shared_bytes
            if kernel.resources.shared_bytes >= plain:
                attribute = self._driver.CUfunction_attribute
                kind = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self.call("cuFuncSetAttribute", function, kind, kernel.shared_bytes)
            self._loaded[spec] = function, kernel
        return self._loaded[spec]

    def call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """What the driver returns behind the error code."""
        error, *results = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            _, text = self._driver.cuGetErrorString(error)
            reason = text.decode() if isinstance(text, bytes) else str(text)
            raise DflashError(f"{name}: {one_line(reason)}")
        return tuple(results)


class GpuRunner:
    """Runs operations over host arrays, in guarded memory of the device, and again without guards.

    The second run's memory ends where tensors end: what compute-sanitizer's memcheck takes for a
    read outside would be a read of a guard in the first. `warps` take the place of a launch's own.
    """

    def __init__(self, device: Device, launcher: KernelLauncher, warps: int | None = None) -> None:
        self._device, self._launcher, self._warps = device, launcher, warps

    def run(
        self, operation: str, inputs: Arrays, attributes: Attributes, tactic: int = 0
    ) -> dict[str, Array]:
        """Outputs of `operation` over `inputs` (aliased ones are copies).

        Raises:
            AssertionError: the kernel wrote outside of its outputs, or other bits the second time.
            DflashError: the CUDA driver reported an error.
        """
        found, again = (
            run_guarded(operation, inputs, attributes, tactic, partial(self._launch, is_exact))
            for is_exact in (False, True)
        )
        for name, array in found.items():
            assert array.tobytes() == again[name].tobytes(), f"{name} has other bits once more"
        return found

    def _launch(
        self,
        is_exact: bool,
        operation: Operation,
        launch: Launch,
        specs: Mapping[str, TensorSpec],
        held: Buffers,
    ) -> None:
        launch = replace(launch, warps=self._warps or launch.warps)
        buffers = {
            id(one): (one.inner, 0) if is_exact else (one.memory, one.offset)
            for one in held.values()
        }
        addresses, copies = {}, {}
        try:
            for key, (memory, _) in buffers.items():
                addresses[key] = self._device.allocate(memory.size, "a tensor of the check")
                copies[key] = self._device.allocate_host(memory.size)
                copies[key][...] = memory
                self._device.upload(addresses[key], copies[key])
            names = (*operation.inputs, *operation.outputs)
            first = [addresses[key] + buffers[key][1] for key in (id(held[one]) for one in names)]
            spec = kernel_spec(operation, specs, launch)
            self._launcher.launch(spec, launch, first, self._device.stream)
            self._device.synchronize()  # until then the uploads may still read the copies
            for key in buffers:
                self._device.download(copies[key], addresses[key])
            self._device.synchronize()
            for key, (memory, _) in buffers.items():
                memory[...] = copies[key]
        finally:
            with suppress(DflashError):  # the first error is already on its way
                self._device.synchronize()
            for address in addresses.values():
                self._device.free(address)
            for copy in copies.values():
                self._device.free_host(copy)


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: launches one after another, over the `inputs` of the first and their own.

    `moved` is how many bytes they need of memory; None is all of the first one's tensors.
    """

    cases: list[Case]
    inputs: Callable[[], Arrays]
    moved: int | None = None

    @property
    def name(self) -> str:
        return self.cases[0].name


class Timer:
    """Times launches with a cold L2 cache, by the driver's events."""

    def __init__(self, device: Device, launcher: KernelLauncher) -> None:
        self._device, self._launcher = device, launcher
        self._flushed = device.allocate(FLUSHED_BYTES, "a flush of the L2 cache")

    def tactic_seconds(self, point: Point) -> list[float]:
        """The median seconds of a point's launches, for each tactic of the first.

        Raises:
            DflashError: it does not fit the GPU, or the driver reported an error.
        """
        known: dict[str, int] = {}
        try:
            for name, array in point.inputs().items():
                known[name] = self._upload(array)
            for case in point.cases:
                for name, spec in case.outputs.items():
                    alias = case.operation.aliases.get(name)
                    known[name] = known[alias] if alias else self._allocate(spec.nbytes)
            tactics = range(point.cases[0].operation.tactics)
            return [self._seconds(point, known, tactic) for tactic in tactics]
        finally:
            for address in set(known.values()):
                self._device.free(address)

    def _seconds(self, point: Point, known: Mapping[str, int], tactic: int) -> float:
        device, launcher = self._device, self._launcher
        launches = []
        for case in point.cases:
            number, operation = min(tactic, case.operation.tactics - 1), case.operation
            addresses = [known[name] for name in (*operation.inputs, *operation.outputs)]
            launches.append((case.kernel_spec(number), case.launch(number), addresses))
        times = []
        begin, end = (launcher.call("cuEventCreate", 0)[0] for _ in range(2))
        for _ in range(WARM_UP_CALLS + TIMED_CALLS):
            device.clear(self._flushed, FLUSHED_BYTES)
            launcher.call("cuEventRecord", begin, device.stream)
            for spec, launch, addresses in launches:
                launcher.launch(spec, launch, addresses, device.stream)
            launcher.call("cuEventRecord", end, device.stream)
            device.synchronize()
            times.append(float(launcher.call("cuEventElapsedTime", begin, end)[0]))
        for event in (begin, end):
            launcher.call("cuEventDestroy", event)
        return median(times[WARM_UP_CALLS:]) / 1e3

    def _allocate(self, size: int) -> int:
        return self._device.allocate(size, "a tensor of the check")

    def _upload(self, array: Array) -> int:
        address, host = self._allocate(array.nbytes), self._device.allocate_host(array.nbytes)
        host[...] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._device.upload(address, host)
        self._device.synchronize()
        self._device.free_host(host)
        return address

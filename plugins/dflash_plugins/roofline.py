"""The least time of a kernel on a GPU that is known: its launches, and its bytes from memory.

    least = launches · LAUNCH + latency + bytes ÷ min(REACH · bandwidth, in flight ÷ latency)

`in flight` is what the resident programs of the compiled kernel can have on its way at once, by
Little's law: loads end in shared memory or in registers. It knows no arithmetic, so a kernel that
waits for its own products is slower than this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dflash_plugins.compile import WARP, CompiledKernel, compile_kernel
from dflash_plugins.operation import Case
from dflash_trt.hardware.device import Device
from dflash_trt.hardware.gpus import Arch, Gpu, arches, match_gpu

LAUNCH_S = 1.28e-6
"""Of a launch that waits for the one before it, in a CUDA graph: RRZE-HPC/gpu-benches,
gpu-small-kernels/h200_graph.txt."""

REACH = 0.92
"""Of the data sheet's bandwidth, what streaming reaches: pytorch/ao, roofline_utils.py."""

LATENCY_S = {"sm_90": 348e-9, "sm_100": 432e-9, "sm_103": 432e-9, "sm_120": 330e-9}
"""Of a load from memory: markdewing/AI_kernels, latency/README.md; sm_103 is taken to be sm_100."""

REGISTER_BYTES = 4
REGISTER_STEP, WARP_REGISTER_STEP, BLOCK_SHARED_BYTES = 8, 256, 1024
"""Steps in which a thread and a warp get registers, and shared memory that the system keeps of each
block (CUDA's occupancy rules)."""

Predictor = Callable[[Sequence[Case], int | None], float]
"""The least seconds of launches that move so many bytes; None: all tensors of the first."""


@dataclass(frozen=True, slots=True)
class MemoryRates:
    """A GPU's memory, and what one of its multiprocessors holds of programs."""

    gpu: Gpu
    arch: Arch
    sms: int

    def resident(self, kernel: CompiledKernel) -> int:
        """Programs of `kernel` on one multiprocessor."""
        warps, took = kernel.threads // WARP, kernel.resources
        registers = -(-took.registers // REGISTER_STEP) * REGISTER_STEP * WARP
        registers = -(-registers // WARP_REGISTER_STEP) * WARP_REGISTER_STEP
        return min(
            self.arch.sm_threads // kernel.threads,
            self.arch.registers // (registers * warps),
            self.arch.sm_shared_bytes // (took.shared_bytes + BLOCK_SHARED_BYTES),
        )

    def bandwidth(self, kernel: CompiledKernel, programs: int) -> float:
        """Bytes/s that `programs` programs get of the memory at most."""
        held = min(programs, self.sms * self.resident(kernel))
        took = kernel.resources
        each = took.shared_bytes + took.registers * kernel.threads * REGISTER_BYTES
        return min(REACH * self.gpu.bandwidth, held * each / LATENCY_S[self.arch.name])


def open_predictor(device: Device, folder: Path) -> Predictor | None:
    """The least times on `device`; None where its figures are not known.

    `folder` keeps what is compiled.
    """
    gpu = match_gpu(device.name, device.arch, device.total_bytes)
    if gpu is None or gpu.sms is None or gpu.arch not in LATENCY_S:
        return None
    return partial(least_seconds, MemoryRates(gpu, arches()[gpu.arch], gpu.sms), folder)


def least_seconds(
    memory: MemoryRates, folder: Path, cases: Sequence[Case], moved: int | None = None
) -> float:
    """The least seconds of launches in turn, by the tactic whose programs get most of the memory.

    Raises:
        DflashError: Triton language is not installed, or a kernel does not compile.
    """
    first = cases[0]
    if moved is None:
        tensors = {**first.inputs, **first.outputs}
        moved = sum(one.nbytes for one in tensors.values())
    rates = []
    for tactic in range(first.operation.tactics):
        launch = first.launch(tactic)
        assert memory.arch.kernels is not None
        kernel = compile_kernel(first.kernel_spec(tactic), memory.arch.kernels, folder)
        rates.append(memory.bandwidth(kernel, launch.grid[0] * launch.grid[1] * launch.grid[2]))
    return len(cases) * LAUNCH_S + LATENCY_S[memory.arch.name] + moved / max(rates)

"""One GPU architecture."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.hardware.gpu import Format

DEFAULT_ARCH = "sm_120"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """What all GPUs of one architecture have in common.

    Args:
        name: as "sm_100".
        devices: its GPUs, as people call them.
        largest_bytes: memory of the largest of them: what does not fit there fits nowhere.
        formats: the quantised formats that its tensor cores multiply.
        tensorrt_rtx: its name in TensorRT-RTX's ComputeCapability; None where it has none.
        kernels: what this project's kernels are compiled for, as "sm_100a"; None without kernels.
        draft_attention: TensorRT-LLM's best backend for a draft's attention.
        shared_bytes, registers: the most of one block: shared memory, 32-bit registers.
        source: where the figures are from.
    """

    name: str
    devices: str
    largest_bytes: int
    formats: tuple[Format, ...] = ()
    tensorrt_rtx: str | None = None
    kernels: str | None = None
    draft_attention: str = "VANILLA"
    shared_bytes: int = 0
    registers: int = 0
    source: str = ""

    @property
    def number(self) -> int:
        """Its compute capability without the point, as 100."""
        return int(self.name.removeprefix("sm_"))

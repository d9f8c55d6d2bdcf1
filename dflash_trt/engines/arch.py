"""The GPU architectures that TensorRT-RTX engines can be built for, as data."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from dflash_trt.checkpoints.quantization import Algorithm
from dflash_trt.errors import DflashError

DEFAULT_ARCH = "sm_120"


@dataclass(frozen=True, slots=True)
class Arch:
    """One architecture.

    `capability` is its name in TensorRT-RTX's ComputeCapability; `largest_gb` the memory of the
    largest device that has it: what does not fit there fits nowhere. `algorithms` are the
    quantised products that its tensor cores have.
    """

    name: str
    capability: str
    devices: str
    largest_gb: int
    algorithms: tuple[Algorithm, ...] = ()

    @property
    def largest_bytes(self) -> int:
        return self.largest_gb * 10**9


ARCHES = {
    arch.name: arch
    for arch in (
        Arch("sm_120", "SM120", "GeForce RTX 50, RTX PRO Blackwell", 96, ("FP8", "NVFP4")),
        Arch("sm_121", "SM121", "GB10 (DGX Spark)", 128, ("FP8", "NVFP4")),
        Arch("sm_89", "SM89", "GeForce RTX 40, RTX 6000 Ada, L40S", 48, ("FP8",)),
        Arch("sm_86", "SM86", "GeForce RTX 30, RTX A6000, A40", 48),
    )
}


def find_arch(name: str) -> Arch:
    """The architecture called `name`.

    Raises:
        DflashError: TensorRT-RTX engines are not built for it; names the nearest.
    """
    if name in ARCHES:
        return ARCHES[name]
    close = difflib.get_close_matches(name[:40], ARCHES, n=1, cutoff=0.3)
    nearest = f" (nearest: {close[0]!r})" if close else ""
    raise DflashError(
        f"no TensorRT-RTX engines for {name[:40]!r}{nearest}",
        where="--arch",
        fix=f"choose one of {', '.join(ARCHES)}",
        usage=True,
    )

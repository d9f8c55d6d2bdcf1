"""The GPU architectures that engines are built for, as data."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from dflash_trt.backends.tensorrt.library import TENSORRT_RTX, Library
from dflash_trt.checkpoints.quantization import Algorithm
from dflash_trt.errors import DflashError

DEFAULT_ARCH = "sm_120"


@dataclass(frozen=True, slots=True)
class Arch:
    """One architecture.

    `capability` is its name in TensorRT-RTX's ComputeCapability, None where TensorRT-RTX has
    none; `largest_gb` the memory of the largest device that has it: what does not fit there fits
    nowhere. `algorithms` are the quantised products that its tensor cores have.
    """

    name: str
    capability: str | None
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
        Arch("sm_103", None, "B300, GB300", 288, ("FP8", "NVFP4")),
        Arch("sm_100", None, "B200, GB200", 192, ("FP8", "NVFP4")),
        Arch("sm_90", None, "H100, H200", 141, ("FP8",)),
        Arch("sm_86", "SM86", "GeForce RTX 30, RTX A6000, A40", 48),
    )
}


def library_arches(library: Library) -> list[str]:
    """Names of the architectures that `library` can build for, on some machine."""
    return [arch.name for arch in ARCHES.values() if arch.capability or not library.is_rtx]


def find_arch(name: str, library: Library = TENSORRT_RTX) -> Arch:
    """The architecture called `name`.

    Raises:
        DflashError: engines of `library` are not built for it; names the nearest.
    """
    known = library_arches(library)
    if name in known:
        return ARCHES[name]
    close = difflib.get_close_matches(name[:40], known, n=1, cutoff=0.3)
    nearest = f" (nearest: {close[0]!r})" if close else ""
    raise DflashError(
        f"no {library.name} engines for {name[:40]!r}{nearest}",
        where="--arch",
        fix=f"choose one of {', '.join(known)}",
        usage=True,
    )

"""The architectures that kernels are compiled for."""

from __future__ import annotations

from dflash_trt.errors import DflashError
from dflash_trt.hardware.gpus import Arch, arches


def kernel_arches() -> dict[str, Arch]:
    """The architectures with kernels, oldest first, by what is compiled for ("sm_90a")."""
    known = sorted(arches().values(), key=lambda arch: arch.number)
    return {arch.kernels: arch for arch in known if arch.kernels is not None}


def kernel_arch(arch: str) -> str:
    """The architecture that kernels for GPUs of `arch` ("sm_100") are compiled for ("sm_100a").

    Raises:
        DflashError: there are no kernels for it.
    """
    known = {one.name: kernels for kernels, one in kernel_arches().items()}
    if arch not in known:
        raise DflashError(
            f"there are no kernels for {arch}",
            where="--plugins",
            fix=f"they are for {', '.join(known)}; leave it out",
            usage=True,
        )
    return known[arch]

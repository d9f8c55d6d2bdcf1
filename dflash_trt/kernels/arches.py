"""The architectures that kernels are compiled for."""

from __future__ import annotations

from dflash_trt.errors import DflashError

ARCHES = {"sm_90a": 90, "sm_100a": 100, "sm_103a": 103, "sm_120a": 120}
"""Compute capability of every architecture that kernels are compiled for."""


def kernel_arch(arch: str) -> str:
    """The architecture that kernels for GPUs of `arch` ("sm_100") are compiled for ("sm_100a").

    Raises:
        DflashError: there are no kernels for it.
    """
    specific = f"{arch}a"
    if specific not in ARCHES:
        able = ", ".join(name.removesuffix("a") for name in ARCHES)
        raise DflashError(
            f"there are no kernels for {arch}",
            where="--plugins",
            fix=f"they are for {able}; leave it out",
            usage=True,
        )
    return specific

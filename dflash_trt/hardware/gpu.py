"""One GPU's data sheet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MathPrecision = Literal["bf16", "fp8", "fp4"]
"""What tensor cores multiply in."""
Format = Literal["fp8", "nvfp4"]
"""Quantised linears whose products tensor cores have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What the data sheet promises of one GPU; real programs get a fraction of it.

    Args:
        name, title: what `--gpu` takes, and what people call it.
        arch: the architecture that engines are built for, as "sm_100".
        memory_bytes: decimal, as data sheets count.
        bandwidth: of its memory, bytes/s.
        bf16, fp8, fp4: dense FLOP/s of its tensor cores (a multiply-add counts two); None where
            they do not have that precision.
        link: what joins it to other GPUs.
        link_bandwidth: bytes/s of one GPU in one direction.
        link_gpus: how many GPUs that link joins.
        source: where the figures are from.
    """

    name: str
    title: str
    arch: str
    memory_bytes: int
    bandwidth: float
    bf16: float
    fp8: float | None
    fp4: float | None
    link: str
    link_bandwidth: float
    link_gpus: int
    source: str

    def flops(self, precision: MathPrecision) -> float:
        """Dense FLOP/s in `precision`, or in the next wider one that the tensor cores have."""
        if precision == "fp4" and self.fp4 is not None:
            return self.fp4
        if precision != "bf16" and self.fp8 is not None:
            return self.fp8
        return self.bf16

    @property
    def formats(self) -> tuple[Format, ...]:
        """The quantised formats that it multiplies."""
        rates: dict[Format, float | None] = {"fp8": self.fp8, "nvfp4": self.fp4}
        return tuple(name for name, rate in rates.items() if rate is not None)

"""Storage formats of weights: their bytes, and what tensor cores multiply them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash_trt.hardware.gpu import Gpu, MathPrecision

FormatName = Literal["bf16", "fp8", "nvfp4", "mxfp4"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A way to store a linear's weights.

    Args:
        bits: per weight, block scales included: NVFP4 has 8 bits for 16 weights, MXFP4 for 32.
        math: what both operands are multiplied in on tensor cores that have it.
    """

    name: FormatName
    bits: float
    math: MathPrecision

    def bytes(self, weights: int) -> float:
        return weights * self.bits / 8

    def flops(self, gpu: Gpu) -> float:
        """Dense FLOP/s that `gpu` promises for it.

        MXFP4 weights meet MXFP8 activations, which only tensor cores with FP4 take; elsewhere
        they are widened to bf16, and so is NVFP4.
        """
        needs_fp4 = self.name in ("mxfp4", "nvfp4")
        return gpu.bf16 if needs_fp4 and gpu.fp4 is None else gpu.flops(self.math)


FORMATS: dict[FormatName, WeightFormat] = {
    format.name: format
    for format in (
        WeightFormat("bf16", 16, "bf16"),
        WeightFormat("fp8", 8, "fp8"),
        WeightFormat("nvfp4", 4.5, "fp4"),
        WeightFormat("mxfp4", 4.25, "fp8"),
    )
}

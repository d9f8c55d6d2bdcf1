"""The number formats that weights are stored in: one name, and what follows from it."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

MathPrecision = Literal["bf16", "fp8", "fp4"]
"""What tensor cores multiply in."""

MX_BLOCK = 32
"""Columns of an MXFP4 matrix that share one E8M0 scale (OCP Microscaling Formats 1.0)."""
NVFP4_BLOCK = 16
"""Columns of an NVFP4 matrix that share one E4M3 scale."""
INT8_BLOCK = 32
"""Columns of an eight-bit matrix that share one float32 step and a zero point."""
INT8_COLUMNS = 1 << 18
"""Of the widest such matrix."""
INT8_BYTES = 1 + 5 / INT8_BLOCK
"""Of a weight in such a matrix."""


class Format(StrEnum):
    """A format of a linear's weights, by the name that options and configurations have.

    Checkpoints, manifests and graphs have `algorithm` for it.
    """

    BF16 = "bf16"
    FP8 = "fp8"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"

    @property
    def algorithm(self) -> str:
        """ModelOpt's `quant_algo`, as "NVFP4"."""
        return self.value.upper()

    @property
    def block(self) -> int | None:
        """Columns that share a block scale; None where a tensor has one scale or none."""
        return {Format.NVFP4: NVFP4_BLOCK, Format.MXFP4: MX_BLOCK}.get(self)

    @property
    def bits(self) -> float:
        """Bits per weight, block scales of 8 bits included."""
        if self.block is not None:
            return 4 + 8 / self.block
        return 8 if self is Format.FP8 else 16

    @property
    def math(self) -> MathPrecision:
        """What both operands are multiplied in on tensor cores that have it.

        MXFP4 is multiplied with FP8 inputs.
        """
        known: dict[Format, MathPrecision] = {Format.BF16: "bf16", Format.NVFP4: "fp4"}
        return known.get(self, "fp8")

    def bytes(self, weights: float) -> float:
        """Bytes that so many weights take."""
        return weights * self.bits / 8


QUANTIZED = (Format.FP8, Format.NVFP4)
"""What this project quantises linears to."""

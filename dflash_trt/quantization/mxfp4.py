"""MXFP4: E2M1 codes with a power-of-two scale (E8M0) per 32 columns.

Format: OCP Microscaling Formats 1.0, as gpt-oss checkpoints store it. The scale is the smallest
power of two that clips nothing; docs/design/quantised-linears.md has the formulas.
"""

from __future__ import annotations

import numpy as np

from dflash_trt.core.formats import MX_BLOCK
from dflash_trt.quantization.formats import (
    E2M1_MAX,
    E8M0_BIAS,
    Codes,
    Float32,
    decode_e8m0,
    decode_packed_e2m1,
    encode_e2m1,
    encode_e8m0,
    pack_e2m1,
)


def quantize_mxfp4(values: Float32) -> tuple[Codes, Codes]:
    """Packed codes [..., K/2] and E8M0 scales [..., K/32] of finite values [..., K].

    K is a multiple of 32.
    """
    blocks = values.reshape(*values.shape[:-1], -1, MX_BLOCK)
    fractions, exponents = np.frexp(np.abs(blocks).max(axis=-1) / np.float32(E2M1_MAX))
    # frexp's fraction lies in [0.5, 1), or is 0: only 0.5 is a power of two.
    ceilings = np.where(fractions > 0.5, exponents, exponents - 1)
    scales = encode_e8m0(np.where(fractions == 0, -E8M0_BIAS, ceilings))
    codes = encode_e2m1(blocks / decode_e8m0(scales)[..., None])
    return pack_e2m1(codes.reshape(values.shape)), scales


def dequantize_mxfp4(packed: Codes, scales: Codes) -> Float32:
    """Values [..., K] in float32 from packed codes [..., K/2] and scales [..., K/32].

    A block whose scale is E8M0's NaN (code 255) is NaN.
    """
    codes = decode_packed_e2m1(packed)
    blocks = codes.reshape(*scales.shape, MX_BLOCK)
    blocks *= decode_e8m0(scales)[..., None]
    return blocks.reshape(codes.shape)

"""NVFP4: E2M1 codes, an E4M3 scale per 16 columns, one float32 scale per tensor.

Every operation is one float32 operation in the order written, as in graphs and kernels.
docs/design/quantised-linears.md has the formulas, and how weights and activations differ.
"""

from __future__ import annotations

import numpy as np

from dflash_trt.core.formats import NVFP4_BLOCK
from dflash_trt.quantization.formats import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_SMALLEST,
    Codes,
    Float32,
    decode_e4m3,
    decode_packed_e2m1,
    encode_e2m1,
    encode_e4m3,
    pack_e2m1,
)


def nvfp4_global_scale(amax: float) -> np.float32:
    """The scale of a tensor whose largest magnitude is `amax`, for weights and activations."""
    scale = np.float32(amax) / np.float32(E2M1_MAX * E4M3_MAX)
    return scale if scale > 0 else np.float32(1)


def quantize_nvfp4(values: Float32, global_scale: np.float32) -> tuple[Codes, Codes]:
    """Packed codes [..., K/2] and E4M3 block scales [..., K/16] of finite weights [..., K].

    K is a multiple of 16.
    """
    blocks = values.reshape(*values.shape[:-1], -1, NVFP4_BLOCK)
    scales = _block_amax(blocks) / (np.float32(E2M1_MAX) * global_scale)
    scales[scales == 0] = 1
    np.maximum(scales, np.float32(E4M3_SMALLEST), out=scales)
    block_codes = encode_e4m3(scales)
    steps = decode_e4m3(block_codes) * global_scale
    divisors = np.where(steps == 0, np.float32(np.inf), steps)  # of values that underflow: zeros
    with np.errstate(over="ignore"):
        codes = encode_e2m1(blocks / divisors[..., None])
    return pack_e2m1(codes.reshape(values.shape)), block_codes


def dequantize_nvfp4(packed: Codes, block_codes: Codes, global_scale: np.float32) -> Float32:
    """Weights [..., K] in float32 from packed codes [..., K/2] and scales [..., K/16]."""
    steps = decode_e4m3(block_codes) * global_scale
    values = decode_packed_e2m1(packed).reshape(*steps.shape, NVFP4_BLOCK)
    values *= steps[..., None]
    return values.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _block_amax(blocks: Float32) -> Float32:
    """The largest magnitude of each block [..., N, 16]; by pairs, faster than a reduction."""
    largest = np.abs(blocks)
    while largest.shape[-1] > 1:
        largest = np.maximum(largest[..., 0::2], largest[..., 1::2])
    return largest[..., 0]

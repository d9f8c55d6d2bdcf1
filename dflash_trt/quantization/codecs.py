"""FP8, NVFP4 and MXFP4 in NumPy: float32 to codes (round to nearest even) and back.

FP8 is E4M3 codes with one float32 scale per tensor. NVFP4 is E2M1 codes with an E4M3 scale per 16
columns and one float32 scale per tensor; MXFP4 has a power-of-two scale (E8M0) per 32 columns, the
smallest that clips nothing, as gpt-oss checkpoints store it. INT8 is unsigned codes with a float32
step and a zero point per 32 columns, ONNX Runtime's MatMulNBits.

Every operation is one float32 operation in the order written, as in graphs and kernels.
docs/design/engines.md has the formulas, where ModelOpt rounds otherwise, and how weights
and activations differ. Elements: OCP 8-bit Floating Point Specification 1.0 (E4M3) and OCP
Microscaling Formats 1.0 (E2M1, E8M0). The casts equal those of ml_dtypes and are several times
faster.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dflash_trt.core.formats import INT8_BLOCK, MX_BLOCK, NVFP4_BLOCK

Float32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

E4M3_MAX = 448.0
E4M3_SMALLEST = 2.0**-9
E2M1_MAX = 6.0
E8M0_BIAS = 127
E8M0_NAN = 255

_SIGN = np.uint8(8)


def encode_e4m3(values: Float32) -> Codes:
    """E4M3 codes of `values`: clip to ±448, then round to nearest, ties to even.

    NaN stays NaN (code 0x7F or 0xFF); the sign of zero is kept.
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    # Of 7 mantissa bits E4M3 and its midpoints need 4, so the lowest can be a sticky bit.
    top: npt.NDArray[np.uint32] = bits >> np.uint32(16)
    top |= (bits & np.uint32(0xFFFF)) != 0
    return _e4m3_by_top_half().take(top)


def decode_e4m3(codes: Codes) -> Float32:
    """The float32 values of E4M3 codes, exact."""
    return _values(ml_dtypes.float8_e4m3fn, 256).take(codes)


def encode_e2m1(values: Float32) -> Codes:
    """E2M1 codes, one a byte: clip to ±6, then round to nearest, ties to even.

    Negative values that round to zero become -0 (code 8); -0.0 itself and NaN become code 0.
    """
    magnitudes = np.abs(values)
    above = np.empty(magnitudes.shape, bool)
    codes = np.zeros(magnitudes.shape, np.uint8)
    step = above.view(np.uint8)
    # Midpoints between neighbours; a tie goes up where the upper code is even.
    for midpoint, exceeds in (
        (0.25, np.greater),
        (0.75, np.greater_equal),
        (1.25, np.greater),
        (1.75, np.greater_equal),
        (2.5, np.greater),
        (3.5, np.greater_equal),
        (5.0, np.greater),
    ):
        exceeds(magnitudes, np.float32(midpoint), out=above)
        codes += step
    np.less(values, np.float32(0), out=above)
    codes += step * _SIGN
    return codes


def decode_e2m1(codes: Codes) -> Float32:
    """The float32 values of E2M1 codes 0 … 15, exact; code 8 is -0.0."""
    return _values(ml_dtypes.float4_e2m1fn, 16).take(codes)


def pack_e2m1(codes: Codes) -> Codes:
    """Two codes a byte along the last axis, whose length is even: low nibble = even index."""
    packed: Codes = codes[..., 1::2] << np.uint8(4)
    packed |= codes[..., 0::2]
    return packed


def decode_packed_e2m1(packed: Codes) -> Float32:
    """The float32 values of packed codes; the last axis is twice as long."""
    pairs = _e2m1_pairs().take(packed)
    return pairs.view(np.float32)


def decode_e8m0(codes: Codes) -> Float32:
    """2^(code - 127) in float32, exact; code 255 is NaN."""
    return _values(ml_dtypes.float8_e8m0fnu, 256).take(codes)


@cache
def _e4m3_by_top_half() -> Codes:
    """The code of each float32 whose lower 16 bits are zero, by its upper 16 bits."""
    values = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    clipped = np.clip(values, -E4M3_MAX, E4M3_MAX)
    with np.errstate(invalid="ignore"):  # NaN, which stays NaN
        return clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


@cache
def _e2m1_pairs() -> npt.NDArray[np.uint64]:
    """The two float32 values of each byte, side by side in one word."""
    byte = np.arange(256, dtype=np.uint8)
    pairs = np.stack([decode_e2m1(byte & np.uint8(15)), decode_e2m1(byte >> np.uint8(4))], axis=1)
    return np.ascontiguousarray(pairs).view(np.uint64).reshape(256)


@cache
def _values(dtype: Any, count: int) -> Float32:
    values: Float32 = np.arange(count, dtype=np.uint8).view(dtype).astype(np.float32)
    return values


def fp8_scale(amax: float) -> np.float32:
    """The scale of a tensor whose largest magnitude is `amax`, for weights and activations."""
    scale = np.float32(amax) / np.float32(E4M3_MAX)
    return scale if scale > 0 else np.float32(1)


def quantize_fp8(values: Float32, scale: np.float32) -> Codes:
    """E4M3 codes of `values`, in their shape."""
    with np.errstate(over="ignore"):  # what overflows is clipped
        return encode_e4m3(values / scale)


def dequantize_fp8(codes: Codes, scale: np.float32) -> Float32:
    """The values that codes stand for, float32, in their shape."""
    return decode_e4m3(codes) * scale


def nvfp4_global_scale(amax: float) -> np.float32:
    """The scale of a tensor whose largest magnitude is `amax`, for weights and activations."""
    scale = np.float32(amax) / np.float32(E2M1_MAX * E4M3_MAX)
    return scale if scale > 0 else np.float32(1)


def quantize_nvfp4(values: Float32, global_scale: np.float32) -> tuple[Codes, Codes]:
    """Packed codes [..., K/2] and E4M3 block scales [..., K/16] of finite weights [..., K].

    K is a multiple of 16.
    """
    blocks = values.reshape(*values.shape[:-1], -1, NVFP4_BLOCK)
    largest = np.abs(blocks)
    while largest.shape[-1] > 1:  # by pairs, faster than a reduction
        largest = np.maximum(largest[..., 0::2], largest[..., 1::2])
    scales = largest[..., 0] / (np.float32(E2M1_MAX) * global_scale)
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


def quantize_mxfp4(values: Float32) -> tuple[Codes, Codes]:
    """Packed codes [..., K/2] and E8M0 scales [..., K/32] of finite values [..., K].

    K is a multiple of 32.
    """
    blocks = values.reshape(*values.shape[:-1], -1, MX_BLOCK)
    fractions, exponents = np.frexp(np.abs(blocks).max(axis=-1) / np.float32(E2M1_MAX))
    # frexp's fraction lies in [0.5, 1), or is 0: only 0.5 is a power of two.
    ceilings = np.where(fractions > 0.5, exponents, exponents - 1)
    powers = np.where(fractions == 0, -E8M0_BIAS, ceilings)
    scales = (np.clip(powers, -E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS).astype(np.uint8)
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


def quantize_int8(values: Float32) -> tuple[Codes, Float32, Codes]:
    """Codes [N, K/32, 32], steps [N, K/32] and zero points [N, K/32] of finite weights [N, K].

    A weight is (code - zero point) · step; 0 is exact. K is a multiple of 32.
    """
    blocks = values.reshape(len(values), -1, INT8_BLOCK)
    lowest = np.minimum(blocks.min(axis=-1), np.float32(0))
    highest = np.maximum(blocks.max(axis=-1), np.float32(0))
    most = np.float32(255)
    steps = highest / most - lowest / most  # their difference may overflow
    steps[steps == 0] = 1
    zeros = np.clip(np.rint(-lowest / steps), 0, most)
    codes = np.rint(blocks / steps[..., None])
    codes += zeros[..., None]
    return np.clip(codes, 0, most).astype(np.uint8), steps, zeros.astype(np.uint8)

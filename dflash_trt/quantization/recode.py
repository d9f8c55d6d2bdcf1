"""MXFP4 weights as NVFP4 or bf16: the same values, wherever the format can hold them.

Blocks that NVFP4's range of scales does not reach are quantised again, and counted where a value
changes. ModelOpt casts checkpoints by the same rule (`cast_mxfp4_to_nvfp4`), which
docs/design/quantised-linears.md explains.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from dflash_trt.core.formats import MX_BLOCK, NVFP4_BLOCK
from dflash_trt.quantization.formats import (
    E8M0_BIAS,
    Codes,
    decode_e8m0,
    decode_packed_e2m1,
    encode_e4m3,
)
from dflash_trt.quantization.mxfp4 import dequantize_mxfp4
from dflash_trt.quantization.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from dflash_trt.quantization.rows import sum_of_squares

LARGEST_EXPONENT = 8
SMALLEST_EXPONENT = -9
_HALVES = MX_BLOCK // NVFP4_BLOCK


@dataclass(frozen=True, slots=True)
class Recoded:
    """NVFP4 of MXFP4: packed codes [..., K/2], E4M3 scales [..., K/16].

    `exact` and `requantized` count blocks of 16; `error` and `norm` are sums of squares of
    W' - W and of W over the blocks that were quantised again.
    """

    packed: Codes
    scales: Codes
    exact: int
    requantized: int
    error: float
    norm: float


def global_exponent(largest_scale: int) -> int:
    """The exponent of NVFP4's scale for a tensor whose largest E8M0 code is `largest_scale`."""
    return largest_scale - E8M0_BIAS - LARGEST_EXPONENT


def global_scale(shift: int) -> np.float32:
    """2^shift as NVFP4's scale of a tensor."""
    return np.float32(np.ldexp(np.float32(1), shift))


def mxfp4_to_nvfp4(packed: Codes, scales: Codes, shift: int) -> Recoded:
    """NVFP4 with the tensor's scale 2^shift, of packed codes [..., K/2] and scales [..., K/32].

    No scale may be NaN or above 2^(shift + 8): see `global_exponent`.
    """
    relative = scales.astype(np.int32) - (E8M0_BIAS + shift)
    block_scales = _scales_by_exponent().take(np.maximum(relative, SMALLEST_EXPONENT) + 9)
    block_scales = np.repeat(block_scales, _HALVES, axis=-1)
    below = relative < SMALLEST_EXPONENT
    count = block_scales.size
    if not below.any():
        return Recoded(packed, block_scales, count, 0, 0.0, 0.0)
    blocks = packed.reshape(*scales.shape, MX_BLOCK // 2)
    values = dequantize_mxfp4(blocks[below], scales[below][:, None])
    codes, small_scales = quantize_nvfp4(values, global_scale(shift))
    difference = dequantize_nvfp4(codes, small_scales, global_scale(shift)) - values
    changed = (difference.reshape(-1, NVFP4_BLOCK) != 0).any(axis=-1)
    recoded = blocks.copy()
    recoded[below] = codes
    block_scales.reshape(*scales.shape, _HALVES)[below] = small_scales
    requantized = int(changed.sum())
    return Recoded(
        recoded.reshape(packed.shape),
        block_scales,
        count - requantized,
        requantized,
        sum_of_squares(difference.reshape(-1, NVFP4_BLOCK)[changed]),
        sum_of_squares(values.reshape(-1, NVFP4_BLOCK)[changed]),
    )


def mxfp4_to_bf16(packed: Codes, scales: Codes) -> npt.NDArray[np.uint16]:
    """The bits of bf16 values [..., K], all exact but those that bf16 has no finite value for."""
    blocks = packed.reshape(*scales.shape, MX_BLOCK // 2)
    index = (scales.astype(np.uint16) << np.uint16(8))[..., None] | blocks
    return _bf16_pairs().take(index).view(np.uint16).reshape(*packed.shape[:-1], -1)


def _scales_by_exponent() -> Codes:
    """E4M3 codes of 2^-9 … 2^8."""
    exponents = np.arange(SMALLEST_EXPONENT, LARGEST_EXPONENT + 1)
    return encode_e4m3(np.ldexp(np.float32(1), exponents).astype(np.float32))


@cache
def _bf16_pairs() -> npt.NDArray[np.uint32]:
    """The two bf16 values, side by side in one word, of each scale and byte."""
    byte = np.arange(256, dtype=np.uint8)
    with np.errstate(over="ignore"):
        values = decode_e8m0(byte)[:, None, None] * decode_packed_e2m1(byte[:, None])
    # At most one bit follows the leading one, so the lower half is zero, of subnormals too.
    bits = (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.ascontiguousarray(bits).view(np.uint32).reshape(-1)

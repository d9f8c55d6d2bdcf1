"""FP8: E4M3 codes with one float32 scale per tensor.

Every operation is one float32 operation in the order written, as in graphs and kernels.
docs/design/quantised-linears.md has the formulas, and where ModelOpt rounds otherwise.
"""

from __future__ import annotations

import numpy as np

from dflash_trt.quantization.formats import E4M3_MAX, Codes, Float32, decode_e4m3, encode_e4m3


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

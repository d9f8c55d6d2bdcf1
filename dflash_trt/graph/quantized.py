"""Quantised linears: y = x̂ Ŵ^T; of FP8 and NVFP4 x is rounded and W decoded as hardware does.

For the CPU a linear is two functions, so that linears which read one input at one scale (q, k and
v; gate and up) round it once. TensorRT's bodies are its own quantisation layers around a product.
docs/design/engines.md has the formulas and the order of roundings.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from dflash_trt.core.formats import INT8_BLOCK
from dflash_trt.graph.form import Precision
from dflash_trt.graph.functions import CONTRIB_DOMAIN, define
from dflash_trt.graph.model import GraphBuilder
from dflash_trt.models.quantization import LinearFormat
from dflash_trt.models.quantized_weights import INPUT_SCALE, SCALES, read_scalar
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.quantization.codecs import decode_packed_e2m1

MATMUL_NBITS = "MatMulNBits"
FP4_QUANTIZE = "TRT_FP4DynamicQuantize"

# A Cast to E4M3 saturates.
_FP8_ROUND_CPU = """
fp8_round (x, input_scale) => (x_hat)
{
    quotient = Div (x, input_scale)
    codes = Cast <to = 17> (quotient)
    rounded = Cast <to = 1> (codes)
    x_hat = Mul (rounded, input_scale)
}
"""
_FP8_LINEAR_CPU = """
fp8_linear (x_hat, weight, weight_scale) => (y)
{
    w_hat = DequantizeLinear (weight, weight_scale)
    y = Gemm <transB = 1> (x_hat, w_hat)
}
"""

# E2M1 has steps of 0.5 below 2, 1 below 4 and 2 above: to round to a step is to round to E2M1.
_NVFP4_ROUND_CPU = """
nvfp4_round (x, input_scale) => (x_hat)
{
    let blocks = [0, -1, 16], rows = [0, -1], within = [2], zero = 0.0, half = 0.5, one = 1.0
    let two = 2.0, four = 4.0, six = 6.0, minus_six = -6.0

    x_blocks = Reshape (x, blocks)
    magnitudes = Abs (x_blocks)
    largest = ReduceMax <keepdims = 1> (magnitudes, within)
    reach = Mul (six, input_scale)
    block_quotient = Div (largest, reach)
    block_codes = Cast <to = 17> (block_quotient)
    block_scales = Cast <to = 1> (block_codes)
    steps = Mul (block_scales, input_scale)
    is_zero = Equal (steps, zero)
    divisors = Where (is_zero, one, steps)
    quotients = Div (x_blocks, divisors)
    clipped = Clip (quotients, minus_six, six)
    size = Abs (clipped)
    below_four = Less (size, four)
    below_two = Less (size, two)
    coarse = Where (below_four, one, two)
    unit = Where (below_two, half, coarse)
    units = Div (clipped, unit)
    whole = Round (units)
    codes = Mul (whole, unit)
    rounded = Mul (codes, steps)
    x_hat = Reshape (rounded, rows)
}
"""
# A byte is looked up as its two codes, doubled to be integers: folding then takes the least memory.
_NVFP4_LINEAR_CPU = """
nvfp4_linear (x_hat, weight, weight_scale, weight_scale_2) => (y)
{
    let rows = [0, -1], half = 0.5

    bytes = Cast <to = 6> (weight)
    pairs = Gather <axis = 0> (doubled_codes, bytes)
    doubled = Reshape (pairs, rows)
    w_blocks = Cast <to = 1> (weight_scale)
    w_steps = Mul (w_blocks, weight_scale_2)
    half_steps = Mul (w_steps, half)
    w_hat = DequantizeLinear <axis = 1, block_size = 16> (doubled, half_steps)
    y = Gemm <transB = 1> (x_hat, w_hat)
}
"""

_FP8_TENSORRT = """
fp8_linear (x, weight, weight_scale, input_scale) => (y)
{{
    codes = QuantizeLinear <output_dtype = 17> (x, input_scale)
    x_hat = DequantizeLinear <output_dtype = {onnx_type}> (codes, input_scale)
    w_hat = DequantizeLinear <output_dtype = {onnx_type}> (weight, weight_scale)
    y = Gemm <transB = 1> (x_hat, w_hat)
}}
"""

_NVFP4_TENSORRT = """
nvfp4_linear (x, weight, weight_scale, weight_scale_2, input_scale) => (y)
{{
    codes, block_scales = trt.TRT_FP4DynamicQuantize
        <axis = -1, block_size = 16, scale_type = 17> (x, input_scale)
    steps = DequantizeLinear (block_scales, input_scale)
    x_wide = DequantizeLinear <axis = -1, block_size = 16> (codes, steps)
    w_steps = DequantizeLinear (weight_scale, weight_scale_2)
    w_wide = DequantizeLinear <axis = -1, block_size = 16> (weight, w_steps)
{narrowed}
    y = Gemm <transB = 1> ({operands})
}}
"""
_NARROWED = """    x_hat = Cast <to = {onnx_type}> (x_wide)
    w_hat = Cast <to = {onnx_type}> (w_wide)"""


def quantized_product(
    b: GraphBuilder,
    x: str,
    weight_name: str,
    weights: Mapping[str, TensorEntry],
    role: str,
    algorithm: LinearFormat,
    name: str,
    precision: Precision | None = None,
) -> str:
    """x [T,in] times the quantised linear `role`, [T,out]; both in `precision` (the compute type).

    The weight and its scales are referenced in place, as `weight_name` and `weight_name.SCALE`.
    On the CPU, an input that was rounded at the same scale before is not rounded again.
    """
    is_native = b.form.precision is not Precision.FLOAT32
    weight = b.stored(weight_name, weights[role], is_fp4=is_native and algorithm == "NVFP4")
    scales = {
        scale: b.stored(f"{weight_name}.{scale}", weights[f"{role}.{scale}"])
        for scale in SCALES[algorithm]
    }
    if is_native:
        function = tensorrt_function(algorithm, precision or b.form.precision)
        return b.inline(function, [x, weight, *scales.values()], name)
    input_scale = scales.pop(INPUT_SCALE)
    key = (x, algorithm, read_scalar(weights[f"{role}.{INPUT_SCALE}"]))
    x_hat = b.once(key, lambda: b.call(round_function(algorithm), [x, input_scale], f"{name}_x")[0])
    return b.call(linear_function(algorithm), [x_hat, weight, *scales.values()], name)[0]


def int8_product(b: GraphBuilder, x: str, weight_name: str, name: str) -> str | None:
    """x [T,in] times the eight-bit copy of a weight, [T,out]; None where it has none.

    x is rounded to eight bits by blocks too (accuracy level 4), each row by itself. Other levels,
    and most other blocks, give a row alone other bits than among others.
    """
    copy = b.int8(weight_name)
    if not copy:
        return None
    rows, blocks, block = b.shape(copy[0])
    return b.node(MATMUL_NBITS, [x, *copy], name, **nbits_facts(rows, blocks * block))


def nbits_facts(rows: int, columns: int) -> dict[str, Any]:
    """Domain and attributes of a product by an eight-bit matrix [rows, columns]."""
    facts = {"N": rows, "K": columns, "bits": 8, "block_size": INT8_BLOCK, "accuracy_level": 4}
    return {"domain": CONTRIB_DOMAIN, **facts}


@cache
def round_function(algorithm: LinearFormat) -> onnx.FunctionProto:
    """`dflash::fp8_round` or `dflash::nvfp4_round` in operations that ONNX Runtime has."""
    return define(_FP8_ROUND_CPU if algorithm == "FP8" else _NVFP4_ROUND_CPU)


@cache
def linear_function(algorithm: LinearFormat) -> onnx.FunctionProto:
    """`dflash::fp8_linear` or `dflash::nvfp4_linear` in operations that ONNX Runtime has."""
    if algorithm == "FP8":
        return define(_FP8_LINEAR_CPU)
    # Twice the two E2M1 values of each byte, low nibble first.
    doubled = 2 * decode_packed_e2m1(np.arange(256, dtype=np.uint8)[:, None])
    name, table = "doubled_codes", doubled.astype(np.int8).tobytes()
    tensor = helper.make_tensor(name, TensorProto.INT8, [256, 2], table, raw=True)
    return define(_NVFP4_LINEAR_CPU, {name: tensor})


@cache
def tensorrt_function(algorithm: LinearFormat, precision: Precision) -> onnx.FunctionProto:
    """Rounding and product in TensorRT's quantisation layers, the product in `precision`."""
    onnx_type = precision.onnx_type
    if algorithm == "FP8":
        return define(_FP8_TENSORRT.format(onnx_type=onnx_type))
    is_wide = precision is Precision.FLOAT32
    return define(
        _NVFP4_TENSORRT.format(
            narrowed="" if is_wide else _NARROWED.format(onnx_type=onnx_type),
            operands="x_wide, w_wide" if is_wide else "x_hat, w_hat",
        )
    )

"""Quantised linears: y = x̂ Ŵ^T; of FP8 and NVFP4 x is rounded and W decoded as hardware does.

For the CPU a linear is two functions, so that linears which read one input at one scale (q, k and
v; gate and up) round it once. TensorRT's bodies are its own quantisation layers around a product.
docs/design/engines.md has the formulas and the order of roundings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def int8_product(
    b: GraphBuilder, x: str, copy: Sequence[str], name: str, bias: str | None = None
) -> str:
    """x [T,in] times the parts of a weight's eight-bit copy, plus a bias [out]: [T,out].

    x is rounded to eight bits by blocks too (accuracy level 4), each row by itself. Other levels,
    and most other blocks, give a row alone other bits than among others.
    """
    rows, blocks, block = b.shape(copy[0])
    operands = [x, *copy, *([] if bias is None else ["", bias])]
    return b.node(MATMUL_NBITS, operands, name, **nbits_facts(rows, blocks * block))


def stack_products(model: onnx.ModelProto) -> None:
    """Makes one product of those that read one input by copies one behind the other in their file.

    Values keep names and bits: a column of a product depends on no other.
    """
    stored = {one.name: one for one in model.graph.initializer}
    bodies = (one.g for node in model.graph.node for one in node.attribute if one.HasField("g"))
    graphs, replaced = [*bodies, model.graph], set[str]()
    for graph in graphs:
        behind = dict[str, list[onnx.NodeProto]]()  # the run that an input's last product ends
        stacks = dict[str, list[onnx.NodeProto]]()  # by the first value of a run
        for node in graph.node:
            if node.op_type == MATMUL_NBITS:
                run = behind.get(node.input[0], [])
                if not run or not _lies_behind(run[-1], node, stored):
                    run = behind[node.input[0]] = stacks[node.output[0]] = []
                run.append(node)
        members = {one.output[0] for run in stacks.values() for one in run[1:]}
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            run = stacks.get(node.output[0], [])
            if len(run) > 1:
                nodes += _stacked(run, stored)
                replaced |= {name for one in run for name in one.input[1:4]}
            elif node.output[0] not in members:
                nodes.append(node)
        if replaced:  # what is made of weights alone first: casts of biases that are put together
            nodes.sort(key=lambda node: not all(name in stored for name in node.input))
        del graph.node[:]
        graph.node.extend(nodes)
    replaced -= {name for graph in graphs for node in graph.node for name in node.input}
    del model.graph.initializer[:]
    model.graph.initializer.extend(one for name, one in stored.items() if name not in replaced)


def _lies_behind(
    first: onnx.NodeProto, second: onnx.NodeProto, stored: Mapping[str, TensorProto]
) -> bool:
    """Whether every part of the second product's matrix begins where the first's ends."""
    if len(first.input) != len(second.input):  # one has a bias
        return False
    for pair in zip(first.input[1:4], second.input[1:4], strict=True):
        (file, offset, length), (other, start, _) = (
            [one.value for one in stored[name].external_data] for name in pair
        )
        if file != other or int(offset) + int(length) != int(start):
            return False
    return True


def _stacked(run: Sequence[onnx.NodeProto], stored: dict[str, TensorProto]) -> list[onnx.NodeProto]:
    """One product in place of `run`, and the Split of its columns; adds what they read."""
    product, operands = onnx.NodeProto(), [run[0].input[0]]
    product.CopyFrom(run[0])
    product.name = product.output[0] = f"{run[0].output[0]}_stack"
    for names in zip(*(node.input[1:4] for node in run), strict=True):
        parts, wide = [stored[name] for name in names], TensorProto()
        wide.CopyFrom(parts[0])
        wide.name = "+".join([names[0].rpartition(".")[0], *(n.split(".")[-2] for n in names[1:])])
        wide.name += f".{names[0].rpartition('.')[2]}"
        wide.dims[0] = sum(one.dims[0] for one in parts)
        wide.external_data[2].value = str(sum(int(one.external_data[2].value) for one in parts))
        stored[wide.name] = wide
        operands.append(wide.name)
    added: list[onnx.NodeProto] = []
    if biases := [node.input[5] for node in run if len(node.input) > 4]:
        operands += ["", f"{product.name}_bias"]
        added.append(helper.make_node("Concat", biases, operands[-1:], operands[-1], axis=0))
    product.input[:] = operands
    rows = [stored[node.input[1]].dims[0] for node in run]
    for attribute in product.attribute:
        if attribute.name == "N":
            attribute.i = sum(rows)
    sizes = helper.make_tensor(
        "rows." + "+".join(map(str, rows)), TensorProto.INT64, [len(rows)], rows
    )
    stored.setdefault(sizes.name, sizes)
    operands, values = [product.output[0], sizes.name], [node.output[0] for node in run]
    split = helper.make_node("Split", operands, values, f"{product.name}_split", axis=1)
    return [*added, product, split]


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

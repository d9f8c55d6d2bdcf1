"""How a layer's experts are stored, and the operations that turn one into matrices.

The bodies below are pieces of `dflash::moe` (moe.py). On the CPU they take expert `e` and give
`w_in` [2,H,I] and `w_out` [2,I,H/2], each matrix in two halves of its columns; for TensorRT they
take `ids` [T,k] and give `w_in` [T,k,H,2I] and `w_out` [T,k,I,H].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from dflash_trt.core.formats import MX_BLOCK, NVFP4_BLOCK
from dflash_trt.graph.form import Precision
from dflash_trt.graph.model import GraphBuilder
from dflash_trt.graph.model_builder import LayerBuilder
from dflash_trt.models.moe import MoeSpec
from dflash_trt.models.quantized_weights import EXPERT_BLOCKS, WEIGHT_SCALE, WEIGHT_SCALE_2
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.quantization.codecs import Float32, decode_e4m3, decode_e8m0, decode_packed_e2m1

PARTS = ("gate", "up", "down")
MATRICES = ("gate_up", "down")
_BYTES = np.arange(256, dtype=np.uint8)

# What the templates below take on the CPU, where `e` is one expert, and where `ids` are many.
_ONE: dict[str, Any] = {
    "expert": "e",
    "turn": [1, 0],
    "perm": [0, 2, 1],
    "cast": "floats = Cast <to = 1> (taken)",
    "rows": "floats",
    "axis": "",
}
_MANY: dict[str, Any] = {
    "expert": "ids",
    "turn": [0, 1, 3, 2],
    "perm": [0, 1, 3, 2],
    "cast": "",
    "rows": "taken",
    "axis": ", axis_2",
}

_STACKED_CPU = """
{side}_taken = Gather <axis = 0> ({name}, e)
{side}_halves = Reshape ({side}_taken, halves)
{side}_turned = Transpose <perm = [1, 0, 2]> ({side}_halves)
w_{side} = Cast <to = 1> ({side}_turned)
"""
_STACKED_GATHER = "w_{side} = Gather <axis = 0> ({name}, ids)"

# Stacked as rows [out, in].
_ROWS = """
{side}_taken = Gather <axis = 0> ({name}, {expert})
{side}_floats = Cast <to = {onnx_type}> ({side}_taken)
{side}_rows = Reshape ({side}_floats, {side}_shape)
w_{side} = Transpose <perm = {perm}> ({side}_rows)
"""

_SEPARATE = """
parts = Gather <axis = 0> (places, {expert})
taken = Gather <axis = 0> (experts, parts)
{cast}
in_flat = Slice ({rows}, from_0, from_2{axis})
out_flat = Slice ({rows}, from_2, from_3{axis})
in_rows = Reshape (in_flat, in_shape)
out_rows = Reshape (out_flat, out_shape)
w_in = Transpose <perm = {perm}> (in_rows)
w_out = Transpose <perm = {perm}> (out_rows)
"""

# A byte is looked up as its two codes, a scale as its power of two.
_MXFP4 = """
{side}_blocks = Gather <axis = 0> ({name}_blocks, {expert})
{side}_bytes = Cast <to = 6> ({side}_blocks)
{side}_pairs = Gather <axis = 0> (code_values, {side}_bytes)
{side}_codes = Reshape ({side}_pairs, {side}_block_shape)
{side}_exponents = Gather <axis = 0> ({name}_scales, {expert})
{side}_places = Cast <to = 6> ({side}_exponents)
{side}_steps = Gather <axis = 0> (step_values, {side}_places)
{side}_values = Mul ({side}_codes, {side}_steps)
{side}_rows = Reshape ({side}_values, {side}_shape)
w_{side} = Transpose <perm = {perm}> ({side}_rows)
"""

# Bytes and scales are turned first: they are few beside floats, and what follows is MXFP4's.
_NVFP4 = """
{side}_stored = Gather <axis = 0> ({name}_codes, {expert})
{side}_blocks = Transpose <perm = {turn}> ({side}_stored)
{side}_bytes = Cast <to = 6> ({side}_blocks)
{side}_pairs = Gather <axis = 0> (code_values, {side}_bytes)
{side}_codes = Reshape ({side}_pairs, {side}_block_shape)
{side}_scales = Gather <axis = 0> ({name}_scales, {expert})
{side}_turned = Transpose <perm = {turn}> ({side}_scales)
{side}_places = Cast <to = 6> ({side}_turned)
{side}_found = Gather <axis = 0> (scale_values, {side}_places)
{side}_wide = Mul ({side}_found, {name}_scale)
{side}_steps = Cast <to = {onnx_type}> ({side}_wide)
{side}_values = Mul ({side}_codes, {side}_steps)
{side}_rows = Reshape ({side}_values, {side}_shape)
w_{side} = Transpose <perm = {perm}> ({side}_rows)
"""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """`inputs` are graph values by their name in the function; `body` uses them.

    `constants` are lists of integers that the body reads by name, `tables` constants that come
    first. `is_interleaved` says that columns of w_in are gate, up, gate, up and so on.
    """

    inputs: Mapping[str, str]
    body: str
    constants: Mapping[str, tuple[int, ...]]
    tables: Mapping[str, TensorProto] = field(default_factory=dict)
    is_interleaved: bool = True


def expert_weights(layer: LayerBuilder, moe: MoeSpec) -> ExpertWeights:
    """The experts of `layer`, as stored on the CPU, else in the compute type where floats."""
    if layer.has("experts.0.gate"):
        return _separate(layer, moe)
    if layer.has("experts.gate_up.rows"):
        return _rows(layer, moe)
    if moe.storage == "MXFP4":
        return _mxfp4(layer, moe)
    if moe.storage == "NVFP4":
        return _nvfp4(layer, moe)
    is_cpu = layer.b.form.precision is Precision.FLOAT32
    take = layer.stored if is_cpu else layer.weight
    inputs = {name: take(f"experts.{name}") for name in MATRICES}
    template = _STACKED_CPU if is_cpu else _STACKED_GATHER
    body = "\n".join(
        template.format(side=side, name=name)
        for side, name in zip(("in", "out"), MATRICES, strict=True)
    )
    return ExpertWeights(inputs, body, {"halves": (0, 2, -1)} if is_cpu else {})


def _rows(layer: LayerBuilder, moe: MoeSpec) -> ExpertWeights:
    """Experts in two tensors [out, in], gate before up."""
    precision = layer.b.form.precision
    is_cpu = precision is Precision.FLOAT32
    take = layer.stored if is_cpu else layer.weight
    words = (_ONE if is_cpu else _MANY) | {"onnx_type": precision.onnx_type}
    sides = list(zip(("in", "out"), MATRICES, strict=True))
    body = "".join(_ROWS.format(side=side, name=name, **words) for side, name in sides)
    inputs = {name: take(f"experts.{name}.rows") for name in MATRICES}
    return ExpertWeights(inputs, body, _row_shapes(layer, moe), is_interleaved=False)


def _row_shapes(layer: LayerBuilder, moe: MoeSpec) -> dict[str, tuple[int, ...]]:
    """The constants `in_shape` and `out_shape`: what experts of rows [out, in] are turned from."""
    hidden, ffn = layer.spec.hidden_size, moe.intermediate_size
    if layer.b.form.precision is Precision.FLOAT32:
        return {"in_shape": (2, ffn, hidden), "out_shape": (2, hidden // 2, ffn)}
    return {"in_shape": (0, 0, 2 * ffn, hidden), "out_shape": (0, 0, hidden, ffn)}


def _separate(layer: LayerBuilder, moe: MoeSpec) -> ExpertWeights:
    """Experts that are stored one by one, as rows [3E, I·H] and where each expert's three lie.

    gate, up and down have as many elements each. Tensors that follow each other in a shard are one
    external initializer; pieces in several shards are put together when the graph is loaded.
    """
    b = layer.b
    is_cpu = b.form.precision is Precision.FLOAT32
    entries = [layer.entry(f"experts.{e}.{part}") for e in range(moe.experts) for part in PARTS]
    order = sorted(range(len(entries)), key=lambda i: (str(entries[i].file), entries[i].offset))
    runs = _contiguous([entries[index] for index in order])
    is_stored = is_cpu and len({entry.dtype for entry in entries}) == 1
    names = [layer.name(f"experts.rows_{number}") for number in range(len(runs))]
    bank = [_run(b, name, run, is_stored) for name, run in zip(names, runs, strict=True)]
    with b.scope("experts"):
        rows = b.node("Concat", bank, "rows", axis=0) if len(bank) > 1 else bank[0]
        table = np.argsort(order).tolist()  # the row of each entry
        places = b.node("Reshape", [b.integers(*table), b.integers(moe.experts, 3)], "places")
    constants = {
        "from_0": (0,),
        "from_2": (2,),
        "from_3": (3,),
        **_row_shapes(layer, moe),
    }
    body = _SEPARATE.format(**(_ONE if is_cpu else _MANY))
    inputs = {"experts": rows, "places": places}
    return ExpertWeights(inputs, body, constants, is_interleaved=False)


def _contiguous(entries: list[TensorEntry]) -> list[list[TensorEntry]]:
    """Entries in file order, as runs of one type without a gap between them."""
    runs: list[list[TensorEntry]] = []
    for entry in entries:
        last = runs[-1][-1] if runs else None
        follows = (
            last is not None
            and (last.file, last.dtype) == (entry.file, entry.dtype)
            and last.offset + last.length == entry.offset
        )
        if follows:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return runs


def _run(b: GraphBuilder, name: str, run: list[TensorEntry], is_stored: bool) -> str:
    """A run of tensors as rows [n, I·H] of one initializer, as stored or in the compute type."""
    shape, length = (len(run), run[0].num_elements), sum(entry.length for entry in run)
    whole = replace(run[0], name=name, shape=shape, length=length)
    return b.stored(name, whole) if is_stored else b.weight(name, whole)


def _mxfp4(layer: LayerBuilder, moe: MoeSpec) -> ExpertWeights:
    inputs = {
        f"{name}_{kind}": layer.stored(f"experts.{name}.{kind}")
        for name in MATRICES
        for kind in ("blocks", "scales")
    }
    steps = _table(decode_e8m0(_BYTES), layer.b.form.precision)
    return _packed(layer, moe, _MXFP4, MX_BLOCK, inputs, {"step_values": steps})


def _nvfp4(layer: LayerBuilder, moe: MoeSpec) -> ExpertWeights:
    kinds = {"codes": EXPERT_BLOCKS, "scales": WEIGHT_SCALE, "scale": WEIGHT_SCALE_2}
    inputs: dict[str, str] = {}
    for name in MATRICES:
        for value, kind in kinds.items():
            role = f"experts.{name}.{kind}"
            entry = layer.entry(role)
            # E4M3 as bytes: they are looked up.
            entry = replace(entry, dtype="U8") if kind == WEIGHT_SCALE else entry
            inputs[f"{name}_{value}"] = layer.b.stored(layer.name(role), entry)
    # In float32: a block's scale and the tensor's may lie far apart.
    scales = _table(decode_e4m3(_BYTES), Precision.FLOAT32)
    return _packed(layer, moe, _NVFP4, NVFP4_BLOCK, inputs, {"scale_values": scales})


def _packed(
    layer: LayerBuilder,
    moe: MoeSpec,
    template: str,
    block: int,
    inputs: Mapping[str, str],
    scales: Mapping[str, TensorProto],
) -> ExpertWeights:
    """Experts of E2M1 codes in blocks of `block` inputs, whose scales are looked up in `scales`."""
    hidden, ffn, precision = layer.spec.hidden_size, moe.intermediate_size, layer.b.form.precision
    is_cpu = precision is Precision.FLOAT32
    lead = () if is_cpu else (0, 0)
    shapes = _row_shapes(layer, moe)
    words = (_ONE if is_cpu else _MANY) | {"onnx_type": precision.onnx_type}
    constants: dict[str, tuple[int, ...]] = {}
    body = ""
    for side, name, rows, columns in (
        ("in", "gate_up", 2 * ffn, hidden),
        ("out", "down", hidden, ffn),
    ):
        constants[f"{side}_block_shape"] = (*lead, rows, columns // block, block)
        constants[f"{side}_shape"] = shapes[f"{side}_shape"]
        body += template.format(side=side, name=name, **words)
    codes = _table(decode_packed_e2m1(_BYTES[:, None]), precision)
    return ExpertWeights(inputs, body, constants, {"code_values": codes, **scales})


def _table(values: Float32, precision: Precision) -> TensorProto:
    """What each byte stands for: [256,n] for values [256] or [256,n]."""
    values = values.reshape(256, -1)
    if precision is Precision.FLOAT32:
        return numpy_helper.from_array(values)
    with np.errstate(over="ignore"):  # float16 has no step above 2^15; weights do not either
        flat = values.reshape(-1).tolist()
        return helper.make_tensor("", precision.onnx_type, values.shape, flat)

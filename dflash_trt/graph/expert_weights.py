"""How a layer's experts are stored, and the operations that turn one into matrices.

The bodies below are pieces of `dflash::moe` (moe.py). In its loop they take expert `e` and give
`w_in` [2,H,I] and `w_out` [2,I,H/2], each matrix in two halves of its columns; without, they
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
from dflash_trt.graph.model_builder import LayerBuilder
from dflash_trt.models.moe import MoeSpec
from dflash_trt.models.quantized_weights import EXPERT_BLOCKS, WEIGHT_SCALE, WEIGHT_SCALE_2
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.quantization.codecs import Float32, decode_e4m3, decode_e8m0, decode_packed_e2m1

PARTS = ("gate", "up", "down")
MATRICES = ("gate_up", "down")
MX_PARTS = {"blocks": "blocks", "scales": "scales"}
NVFP4_PARTS = {"codes": EXPERT_BLOCKS, "scales": WEIGHT_SCALE, "scale": WEIGHT_SCALE_2}
_BYTES = np.arange(256, dtype=np.uint8)

# What the templates below take in a loop, where `e` is one expert, and where `ids` are many.
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
_STACKED_GATHER = """
w_{side} = Gather <axis = 0> ({name}, ids)
"""

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
    hidden, ffn, precision = layer.spec.hidden_size, moe.intermediate_size, layer.b.form.precision
    loops, is_cpu = layer.b.may_loop, precision is Precision.FLOAT32
    lead = () if loops else (0, 0)
    take, words = layer.stored if is_cpu else layer.weight, _ONE if loops else _MANY
    if is_cpu:  # what was taken is as stored
        words = words | {key: _ONE[key] for key in ("cast", "rows")}
    shapes: dict[str, tuple[int, ...]]
    shapes = {"in_shape": (*lead, 2 * ffn, hidden), "out_shape": (*lead, hidden, ffn)}
    if loops:
        shapes = {"in_shape": (2, ffn, hidden), "out_shape": (2, hidden // 2, ffn)}

    def both(template: str) -> str:
        known = words | {"onnx_type": precision.onnx_type}
        sides = zip(("in", "out"), MATRICES, strict=True)
        return "".join(template.format(side=side, name=name, **known) for side, name in sides)

    if layer.has("experts.0.gate"):
        constants = {"from_0": (0,), "from_2": (2,), "from_3": (3,), **shapes}
        inputs, body = _separate(layer, moe), _SEPARATE.format(**words)
        return ExpertWeights(inputs, body, constants, is_interleaved=False)
    if layer.has("experts.gate_up.rows"):  # two tensors [out, in], gate before up
        inputs = {name: take(f"experts.{name}.rows") for name in MATRICES}
        return ExpertWeights(inputs, both(_ROWS), shapes, is_interleaved=False)
    if moe.storage not in ("MXFP4", "NVFP4"):
        take = layer.stored if loops else layer.weight
        inputs = {name: take(f"experts.{name}") for name in MATRICES}
        if loops:
            return ExpertWeights(inputs, both(_STACKED_CPU), {"halves": (0, 2, -1)})
        return ExpertWeights(inputs, both(_STACKED_GATHER), {})
    is_mx = moe.storage == "MXFP4"
    block, constants = MX_BLOCK if is_mx else NVFP4_BLOCK, {}
    for side, rows, columns in (("in", 2 * ffn, hidden), ("out", hidden, ffn)):
        constants[f"{side}_block_shape"] = (*lead, rows, columns // block, block)
        constants[f"{side}_shape"] = shapes[f"{side}_shape"]
    tables = {"code_values": _table(decode_packed_e2m1(_BYTES[:, None]), precision)}
    if is_mx:
        tables["step_values"] = _table(decode_e8m0(_BYTES), precision)
        return ExpertWeights(_stored(layer, MX_PARTS), both(_MXFP4), constants, tables)
    # In float32: a block's scale and the tensor's may lie far apart.
    tables["scale_values"] = _table(decode_e4m3(_BYTES), Precision.FLOAT32)
    return ExpertWeights(_stored(layer, NVFP4_PARTS), both(_NVFP4), constants, tables)


def _stored(layer: LayerBuilder, parts: Mapping[str, str]) -> dict[str, str]:
    """Parts of packed experts as stored, E4M3 as bytes: they are looked up."""
    inputs: dict[str, str] = {}
    for name in MATRICES:
        for value, kind in parts.items():
            role = f"experts.{name}.{kind}"
            entry = layer.entry(role)
            entry = replace(entry, dtype="U8") if kind == WEIGHT_SCALE else entry
            inputs[f"{name}_{value}"] = layer.b.stored(layer.name(role), entry)
    return inputs


def _separate(layer: LayerBuilder, moe: MoeSpec) -> dict[str, str]:
    """Experts that are stored one by one, as rows [3E, I·H] and where each expert's three lie.

    gate, up and down have as many elements each. Tensors that follow each other in a shard are one
    external initializer; pieces in several shards are put together when the graph is loaded.
    """
    b = layer.b
    entries = [layer.entry(f"experts.{e}.{part}") for e in range(moe.experts) for part in PARTS]
    order = sorted(range(len(entries)), key=lambda i: (str(entries[i].file), entries[i].offset))
    runs: list[list[TensorEntry]] = []
    for entry in (entries[index] for index in order):
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and (last.file, last.dtype) == (entry.file, entry.dtype)
            and last.offset + last.length == entry.offset
        ):
            runs[-1].append(entry)
        else:
            runs.append([entry])
    is_cpu = b.form.precision is Precision.FLOAT32
    is_stored = is_cpu and len({entry.dtype for entry in entries}) == 1
    bank = []
    for number, run in enumerate(runs):
        name, length = layer.name(f"experts.rows_{number}"), sum(entry.length for entry in run)
        shape = (len(run), run[0].num_elements)
        whole = replace(run[0], name=name, shape=shape, length=length)
        bank.append(b.stored(name, whole) if is_stored else b.weight(name, whole))
    with b.scope("experts"):
        rows = b.node("Concat", bank, "rows", axis=0) if len(bank) > 1 else bank[0]
        table = np.argsort(order).tolist()  # the row of each entry
        places = b.node("Reshape", [b.integers(*table), b.integers(moe.experts, 3)], "places")
    return {"experts": rows, "places": places}


def _table(values: Float32, precision: Precision) -> TensorProto:
    """What each byte stands for: [256,n] for values [256] or [256,n]."""
    values = values.reshape(256, -1)
    if precision is Precision.FLOAT32:
        return numpy_helper.from_array(values)
    with np.errstate(over="ignore"):  # float16 has no step above 2^15; weights do not either
        flat = values.reshape(-1).tolist()
        return helper.make_tensor("", precision.onnx_type, values.shape, flat)

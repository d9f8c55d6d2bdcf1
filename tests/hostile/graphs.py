"""Graphs that are not the ones that were built, in bundles whose manifest has their hash."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import onnx
from onnx import TensorProto, helper

from tests.hostile.bundles import GENERATE, note
from tests.hostile.case import PROMPT, Command, HostileCase
from tests.hostile.values import TEXTS, spoil

COUNT = 130
_COMMANDS: tuple[Command, ...] = (
    GENERATE,
    ("verify", "bundle", "--repeats", "0", "--batch", "1", *PROMPT),
)
_OPERATIONS = (
    "Identity",
    "MatMul",
    "Add",
    "Loop",
    "If",
    "Scan",
    "Nothing",
    "Reshape",
    "Gather",
    "Tile",
)
_NAMES = [one for one in TEXTS if "\ud800" not in one]  # protobuf has no lone surrogates
_SIZES = (0, -1, 1, 2**20, 2**31, 2**40, 2**62, 2**63 - 1)
_LOCATIONS = (
    *("../outside/x", "/etc/passwd", "", "manifest.json", "weights/tables.safetensors", "."),
    *("/dev/zero", "weights/target/../../../outside/x"),
)


def make(random: Random, number: int) -> HostileCase:
    """A node, a tensor, an input or output, or the bytes of a graph changed."""
    name = random.choice(("target", "draft", "target_only"))
    command, way = random.choice(_COMMANDS), random.randrange(11)

    def damage(folder: Path) -> None:
        bundle = folder / "bundle"
        path = bundle / f"{name}.onnx"
        if way == 0:
            path.write_bytes(spoil(random, path.read_bytes()))
        else:
            model = onnx.load(path, load_external_data=False)
            _damage(random, model, way)
            path.write_bytes(model.SerializeToString())
        note(bundle, path)

    return HostileCase(f"{name}.onnx, way {way}", ("bundle",), damage, (command,))


def _damage(random: Random, model: onnx.ModelProto, way: int) -> None:
    graph = model.graph
    node = random.choice(graph.node)
    if way == 1:
        node.op_type = random.choice(_OPERATIONS)
    elif way == 2:
        node.input[random.randrange(len(node.input))] = random.choice(graph.node).output[0]
    elif way == 3:
        graph.node.remove(node)
    elif way == 4:
        _change_attribute(random, node)
    elif way == 5:
        tensor = random.choice(graph.initializer)
        _change_tensor(random, tensor)
    elif way == 6:
        values = random.choice((graph.input, graph.output))
        one = random.choice(values)
        if random.random() < 0.3:
            values.remove(one)
        elif random.random() < 0.3:
            one.name = random.choice((*_NAMES, "other"))
        else:
            for size in one.type.tensor_type.shape.dim:
                size.dim_value = random.choice(_SIZES)
    elif way == 7:
        _add_growth(random, graph)
    elif way == 8:
        _add_loop(random, graph)
    elif way == 9:
        del model.opset_import[:]
        model.opset_import.append(
            helper.make_opsetid(random.choice(("", "x", "com.microsoft")), 99)
        )
        model.ir_version = random.choice((0, 3, 99, 2**31))
    else:
        node.domain = random.choice(("com.microsoft", "ai.onnx.ml", "x" * 5000, "\n"))


def _change_attribute(random: Random, node: onnx.NodeProto) -> None:
    if not node.attribute or random.random() < 0.2:
        node.attribute.append(helper.make_attribute(random.choice(("axis", "x", "body")), 3))
        return
    attribute = random.choice(node.attribute)
    if attribute.type == onnx.AttributeProto.INT:
        attribute.i = random.choice(_SIZES)
    elif attribute.type == onnx.AttributeProto.INTS:
        attribute.ints.extend([random.choice(_SIZES)] * random.choice((1, 100)))
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = float("nan")
    else:
        attribute.s = b"\xff" * 1000


def _change_tensor(random: Random, tensor: TensorProto) -> None:
    way = random.randrange(4)
    if way == 0 and tensor.dims:
        tensor.dims[random.randrange(len(tensor.dims))] = random.choice(_SIZES)
    elif way == 1:
        tensor.data_type = random.choice((0, 1, 7, 8, 10, 16, 23, 99))
    elif way == 2 and tensor.raw_data:
        tensor.raw_data = spoil(random, tensor.raw_data)
    else:
        tensor.data_location = TensorProto.EXTERNAL
        del tensor.external_data[:]
        numbers = ("0", "-1", "1", str(2**40), str(2**63), "x")
        values = {"location": random.choice(_LOCATIONS)}
        values |= {"offset": random.choice(numbers), "length": random.choice(numbers)}
        for key, value in values.items():
            tensor.external_data.add(key=key, value=value)


def _add_growth(random: Random, graph: onnx.GraphProto) -> None:
    """Memory that no machine has, in a way to the first output.

    What a machine has a graph may take: docs/security.md says so.
    """
    size = random.choice((2**40, 2**62))
    shape = helper.make_tensor("h_shape", TensorProto.INT64, [1], [size])
    graph.initializer.append(shape)
    made = helper.make_node("ConstantOfShape", ["h_shape"], ["h_made"], name="h_made")
    summed = helper.make_node("ReduceMax", ["h_made"], ["h_max"], name="h_max", keepdims=0)
    _put_before_output(graph, [made, summed])


def _add_loop(random: Random, graph: onnx.GraphProto) -> None:
    """A loop of so many turns, in a way to its first output."""
    turns = random.choice((10**12, 2**63 - 1))
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["h_go"], ["h_on"]),
            helper.make_node("Identity", ["h_in"], ["h_out"]),
        ],
        "h_body",
        [
            helper.make_tensor_value_info("h_turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("h_go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h_in", TensorProto.FLOAT, []),
        ],
        [
            helper.make_tensor_value_info("h_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h_out", TensorProto.FLOAT, []),
        ],
    )
    graph.initializer.append(helper.make_tensor("h_turns", TensorProto.INT64, [], [turns]))
    graph.initializer.append(helper.make_tensor("h_true", TensorProto.BOOL, [], [True]))
    graph.initializer.append(helper.make_tensor("h_zero", TensorProto.FLOAT, [], [0.0]))
    loop = helper.make_node("Loop", ["h_turns", "h_true", "h_zero"], ["h_max"], body=body)
    _put_before_output(graph, [loop])


def _put_before_output(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    """Adds what `nodes` compute as "h_max" to the first output of floats."""
    floats = [one.name for one in graph.output if one.type.tensor_type.elem_type == 1]
    name = floats[0] if floats else graph.output[0].name
    made: Any = next(node for node in graph.node if name in node.output)
    made.output[list(made.output).index(name)] = "h_before"
    graph.node.extend(
        [*nodes, helper.make_node("Add", ["h_before", "h_max"], [name], name="h_add")]
    )

"""Damage to files of weights, graphs and GGUF: their headers, values, nodes and numbers."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper
from safetensors.numpy import load_file, save_file

from tests.hostile.values import NUMBERS, changed, encode, odd_value, spoil, spoil_json

_DTYPES = ("F32", "F16", "BF16", "F64", "I8", "F8_E4M3", "F4", "U64", "C64", "BOOL", "f32", "", 4)
_LENGTHS = (0, 1, 7, 8, 99_999_999, 100_000_001, 2**31, 2**32, 2**63, 2**64 - 1)
_VALUES = (np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, 0.0, 1e30)
_TYPES = (np.float16, ml_dtypes.bfloat16, np.float64, np.int8, np.int64, np.bool_, np.uint16)
_OPERATIONS = ("Identity", "MatMul", "Loop", "If", "Scan", "Nothing", "Reshape", "Gather", "Tile")
_SIZES = (0, -1, 1, 2**20, 2**31, 2**40, 2**62, 2**63 - 1)
_LOCATIONS = (
    *("../outside/x", "/etc/passwd", "", "manifest.json", "weights/tables.safetensors", "."),
    *("/dev/zero", "weights/target/../../../outside/x"),
)


def damage_header(random: Random, path: Path) -> None:
    """Changes a safetensors file's header."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    text, rest = data[8:start], data[start:]
    header: dict[str, Any] = json.loads(text)
    length, way = None, random.randrange(7)
    if way == 0:
        text = encode(changed(random, header, ("__metadata__", "x")))
    elif way == 1:
        text = spoil_json(random, text)
    elif way == 2:
        length = random.choice(_LENGTHS)
    elif way == 3:
        text = spoil(random, text)
    elif way == 4:  # thousands of tensors without a byte
        many = {
            f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(9999)
        }
        text = encode({**many, **header})
    else:
        tensor = header[random.choice([key for key in header if key != "__metadata__"])]
        shape, offsets = tensor["shape"], tensor["data_offsets"]
        key, values = random.choice(
            (
                ("dtype", _DTYPES),
                ("shape", ([], [1] * 300, [2**31] * 3, [0, 2**63], shape[::-1], odd_value(random))),
                ("data_offsets", (offsets[::-1], [0, 0], [0], [0, 4, 8], "0", [0, len(rest)])),
                ("data_offsets", [[offsets[0], one] for one in NUMBERS]),
            )
        )
        tensor[key] = random.choice(values)
        text = encode(header)
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + rest)


def damage_tensors(random: Random, path: Path) -> None:
    """Changes some of a safetensors file's tensors."""
    tensors: dict[str, Any] = load_file(path)
    way = random.randrange(6)
    for name in random.sample(sorted(tensors), random.choice((1, 1, 3))):
        array = tensors[name]
        if way == 0:
            tensors[name] = np.full_like(array, random.choice(_VALUES))
        elif way == 1:
            array.flat[random.randrange(array.size)] = random.choice(_VALUES)
        elif way == 2:
            tensors[name] = array.astype(random.choice(_TYPES))
        elif way == 3:
            others = (array.T, array[:1], array[:, None], np.repeat(array, 2, 0), array[:0])
            tensors[name] = random.choice(others)
        elif way == 4:  # any bits are a number
            bits = np.frombuffer(random.randbytes(array.nbytes), array.dtype)
            tensors[name] = bits.reshape(array.shape)
        else:
            del tensors[name]
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path)


def damage_graph(random: Random, path: Path) -> None:
    """Changes a node, a tensor, an input or output, or the bytes of a graph."""
    way = random.randrange(9)
    if way == 0:
        path.write_bytes(spoil(random, path.read_bytes()))
        return
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    node = random.choice(graph.node)
    if way == 1:
        node.op_type = random.choice(_OPERATIONS)
    elif way == 2:
        node.input[random.randrange(len(node.input))] = random.choice(graph.node).output[0]
    elif way == 3:
        graph.node.remove(node)
    elif way == 4:
        for attribute in node.attribute:
            attribute.i = random.choice(_SIZES)
            attribute.ints.extend([random.choice(_SIZES)] * random.choice((1, 100)))
    elif way == 5:
        _change_initializer(random, random.choice(graph.initializer))
    elif way == 6:
        values = random.choice((graph.input, graph.output))
        one = random.choice(values)
        if random.random() < 0.3:
            values.remove(one)
        for size in one.type.tensor_type.shape.dim:
            size.dim_value = random.choice(_SIZES)
    elif way == 7:
        _add_growth(random, graph)
    else:
        del model.opset_import[:]
        model.opset_import.append(helper.make_opsetid(random.choice(("", "x")), 99))
        model.ir_version = random.choice((0, 3, 99, 2**31))
    path.write_bytes(model.SerializeToString())


def _change_initializer(random: Random, tensor: TensorProto) -> None:
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
        tensor.external_data.add(key="location", value=random.choice(_LOCATIONS))
        for key in ("offset", "length"):
            tensor.external_data.add(key=key, value=random.choice(numbers))


def _add_growth(random: Random, graph: onnx.GraphProto) -> None:
    """Memory that no machine has, in a way to the first output of floats.

    What a machine has a graph may take: docs/serving.md says so.
    """
    size = helper.make_tensor("h_size", TensorProto.INT64, [1], [random.choice((2**40, 2**62))])
    graph.initializer.append(size)
    name = next(one.name for one in graph.output if one.type.tensor_type.elem_type == 1)
    made: Any = next(node for node in graph.node if name in node.output)
    made.output[list(made.output).index(name)] = "h_before"
    graph.node.extend(
        [
            helper.make_node("ConstantOfShape", ["h_size"], ["h_made"], name="h_made"),
            helper.make_node("ReduceMax", ["h_made"], ["h_max"], name="h_max", keepdims=0),
            helper.make_node("Add", ["h_before", "h_max"], [name], name="h_add"),
        ]
    )


def note(bundle: Path, path: Path) -> None:
    """Gives the manifest the size and hash that a file of the bundle has now."""
    manifest = bundle / "manifest.json"
    document = json.loads(manifest.read_bytes())
    name, data = str(path.relative_to(bundle)), path.read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little") % (1 << 30)]
    entry: dict[str, Any] = {
        "path": name,
        "bytes": len(data),
        "header_sha256": None,
        "sha256": None,
    }
    key, hashed = ("header_sha256", header) if "shard" in name else ("sha256", data)
    entry[key] = hashlib.sha256(hashed).hexdigest()
    others = [one for one in document["files"] if one["path"] != name]
    document["files"] = sorted([*others, entry], key=lambda one: str(one["path"]))
    manifest.write_text(json.dumps(document))

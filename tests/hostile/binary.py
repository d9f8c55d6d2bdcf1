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
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper
from safetensors.numpy import load_file, save_file

from tests.hostile.values import NUMBERS, TEXTS, changed, encode, odd_value, spoil, spoil_json

_DTYPES = ("F32", "F16", "BF16", "F64", "I8", "F8_E4M3", "F4", "U64", "C64", "BOOL", "f32", "", 4)
_LENGTHS = (0, 1, 7, 8, 99_999_999, 100_000_001, 2**31, 2**32, 2**63, 2**64 - 1)


def damage_header(random: Random, path: Path) -> None:
    """Changes a safetensors file's header in one of nine ways."""
    path.write_bytes(_with_other_header(random, path.read_bytes()))


def _with_other_header(random: Random, data: bytes) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    way = random.randrange(9)
    if way == 0:
        return _packed(encode(changed(random, header, ("__metadata__", "x"))), rest)
    if way == 1:
        return _packed(spoil_json(random, data[8 : 8 + length]), rest)
    if way == 2:
        return _packed(data[8 : 8 + length], rest, random.choice(_LENGTHS))
    if way == 3:
        return spoil(random, data[: 8 + length]) + rest
    if way == 4:
        header["__metadata__"] = random.choice(({"format": odd_value(random)}, odd_value(random)))
        return _packed(encode(header), rest)
    if way == 5:
        return _packed(data[8 : 8 + length] + b" " * random.choice((1, 7, 100_000)), rest)
    if way == 6:  # thousands of tensors without a byte
        many = {
            f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(9999)
        }
        return _packed(encode({**many, **header}), rest)
    name = random.choice([key for key in header if key != "__metadata__"])
    _change_tensor(random, header, name)
    return _packed(encode(header), rest + bytes(random.choice((0, 0, 1, 4096))))


def _change_tensor(random: Random, header: dict[str, Any], name: str) -> None:
    tensor = header[name]
    way = random.randrange(6)
    if way == 0:
        tensor["dtype"] = random.choice(_DTYPES)
    elif way == 1:
        shape = tensor["shape"]
        shape[random.randrange(len(shape))] = random.choice(NUMBERS)
    elif way == 2:
        tensor["shape"] = random.choice(
            ([], [1] * 300, [2**31] * 3, [0, 2**63], tensor["shape"][::-1], odd_value(random))
        )
    elif way == 3:
        tensor["data_offsets"][random.randrange(2)] = random.choice(NUMBERS)
    elif way == 4:
        tensor["data_offsets"] = random.choice(
            (tensor["data_offsets"][::-1], [0, 0], [0], [0, 4, 8], "0", _span(header))
        )
    else:
        header[random.choice((*TEXTS, name + ".", name.upper()))] = header.pop(name)


def _span(header: dict[str, Any]) -> list[int]:
    """The bytes of all tensors together."""
    ends = [one["data_offsets"][1] for one in header.values() if "data_offsets" in one]
    return [0, max(ends)]


def _packed(header: bytes, rest: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + rest


_VALUES = (np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, 0.0, 1e30)
_TYPES = (np.float16, ml_dtypes.bfloat16, np.float64, np.int8, np.int64, np.bool_, np.uint16)


def damage_tensors(random: Random, path: Path) -> None:
    """Changes some of a safetensors file's tensors."""
    tensors = load_file(path)
    names = random.sample(sorted(tensors), random.choice((1, 1, 3)))
    way = random.randrange(8)
    if way == 7:
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        path.write_bytes(data[:start] + spoil(random, data[start:]))
        return
    for name in names:
        tensors[name] = _other_array(random, tensors[name], way)
    if way == 5:
        tensors[random.choice([one for one in TEXTS if one.isprintable()])] = tensors[names[0]]
    elif way == 6:
        for name in names:
            del tensors[name]
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path)


def _other_array(
    random: Random, array: npt.NDArray[np.float32], way: int
) -> npt.NDArray[np.generic]:
    if array.dtype.kind != "f" and way in (0, 1, 4):  # numbers of tokens
        return array[::-1]
    if way == 0:
        return np.full_like(array, random.choice(_VALUES))
    if way == 1:
        spoilt = array.copy()
        spoilt.flat[random.randrange(array.size)] = random.choice(_VALUES)
        return spoilt
    if way == 2:
        return array.astype(random.choice(_TYPES))
    if way == 3:
        return random.choice(
            (array.T, array[:1], array[:, None], np.repeat(array, 2, 0), array[:0])
        )
    if way == 4:  # any bits are a number
        return np.frombuffer(random.randbytes(array.nbytes), np.float32).reshape(array.shape)
    return array


_OPERATIONS = ("Identity", "MatMul", "Loop", "If", "Scan", "Nothing", "Reshape", "Gather", "Tile")
_NAMES = [one for one in TEXTS if "\ud800" not in one]  # protobuf has no lone surrogates
_SIZES = (0, -1, 1, 2**20, 2**31, 2**40, 2**62, 2**63 - 1)
_LOCATIONS = (
    *("../outside/x", "/etc/passwd", "", "manifest.json", "weights/tables.safetensors", "."),
    *("/dev/zero", "weights/target/../../../outside/x"),
)


def damage_graph(random: Random, path: Path) -> None:
    """Changes a node, a tensor, an input or output, or the bytes of a graph."""
    way = random.randrange(11)
    if way == 0:
        path.write_bytes(spoil(random, path.read_bytes()))
        return
    model = onnx.load(path, load_external_data=False)
    _change_graph(random, model, way)
    path.write_bytes(model.SerializeToString())


def _change_graph(random: Random, model: onnx.ModelProto, way: int) -> None:
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
        _change_initializer(random, tensor)
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
        values = {"location": random.choice(_LOCATIONS)}
        values |= {"offset": random.choice(numbers), "length": random.choice(numbers)}
        for key, value in values.items():
            tensor.external_data.add(key=key, value=value)


def _add_growth(random: Random, graph: onnx.GraphProto) -> None:
    """Memory that no machine has, in a way to the first output.

    What a machine has a graph may take: docs/serving.md says so.
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


_LARGE = (0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def damage_gguf(random: Random, path: Path) -> None:
    """Changes bytes or numbers of a GGUF file's header; what it says of keys is in there too."""
    data = path.read_bytes()
    reader_end = data.rfind(b"blk.") + 200  # the last tensor's entry, and then the data
    header, rest = data[:reader_end], data[reader_end:]
    way = random.randrange(5)
    if way == 0:
        path.write_bytes(spoil(random, header) + rest)
        return
    if way == 1:
        cut = data[: random.randrange(len(data))]
        path.write_bytes(random.choice((cut, data + bytes(5), data * 2)))
        return
    other = bytearray(header)
    for _ in range(random.choice((1, 1, 3))):
        # Lengths, counts, types and offsets are numbers of 4 or 8 bytes, and mostly small.
        form = random.choice("IQ")
        wanted = struct.calcsize(form)
        at = _find_number(random, other, wanted)
        value = random.choice(_LARGE) % (1 << (8 * wanted))
        struct.pack_into(f"<{form}", other, at, value)
    path.write_bytes(bytes(other) + rest)


def _find_number(random: Random, data: bytearray, size: int) -> int:
    """Where a number of `size` bytes may lie: a byte, and zeros behind it."""
    for _ in range(200):
        at = random.randrange(4, len(data) - size)
        if data[at] and not any(data[at + 1 : at + size]):
            return at
    return 4


def note(bundle: Path, path: Path) -> None:
    """Gives the manifest the size and hash that a file of the bundle has now."""
    manifest = bundle / "manifest.json"
    document = json.loads(manifest.read_bytes())
    name, data = str(path.relative_to(bundle)), path.read_bytes()
    entry: dict[str, Any] = {"path": name, "bytes": len(data), "header_sha256": None}
    entry["sha256"] = hashlib.sha256(data).hexdigest()
    if "shard" in name:
        header = data[: 8 + int.from_bytes(data[:8], "little") % (1 << 30)]
        entry |= {"header_sha256": hashlib.sha256(header).hexdigest(), "sha256": None}
    others = [one for one in document["files"] if one["path"] != name]
    document["files"] = sorted([*others, entry], key=lambda one: str(one["path"]))
    manifest.write_text(json.dumps(document))

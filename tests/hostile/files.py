"""Values and bytes that nobody expects, and files of weights and graphs that are damaged."""

from __future__ import annotations

import copy
import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper
from safetensors.numpy import load_file, save_file

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 63, 64, 65, 299, 300, 2**15, 2**31 - 1, 2**31, 2**32, 2**53 + 1),
    *(2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1.5, 1e-300, 5e-324, 1e300, 1.7e308, float("nan"), float("inf")),
)
TEXTS: tuple[str, ...] = (
    *("", " ", "\0", "a\nb", "\x1b[31mred", "\u202eabc", "\ud800", "\ufeff", "🙂" * 50),
    *("A" * 5000, "../../outside/x", "/dev/zero", "/proc/self/environ", "a" * 300 + "/b"),
    *("{{7*7}}", "%s%s%n", "__import__('os').system('id')", "nan", "1e999", "-1", "[", "null"),
)
NAMES = ("__class__", "__proto__", "", "a.b", "torch_dtype", "auto_map", "_name_or_path")


def odd_value(random: Random, depth: int = 2) -> Any:
    """Any value of JSON, and NaN and infinities, which Python writes into it."""
    kind = random.randrange(7 if depth else 5)
    if kind == 0:
        return random.choice((None, True, False))
    if kind <= 2:
        return random.choice(NUMBERS)
    if kind == 3:
        return random.choice(TEXTS)
    if kind == 4:
        return random.choice(([], {}, [[]], [None], "x"))
    inner = [odd_value(random, depth - 1) for _ in range(random.randrange(4))]
    return inner if kind == 5 else {random.choice((*NAMES, "a")): one for one in inner}


def changed(random: Random, document: Any, keys: Sequence[str] = ()) -> Any:
    """A copy of a JSON document with one to three places changed; `keys` may be added."""
    root = [copy.deepcopy(document)]
    for _ in range(random.choice((1, 1, 2, 3))):
        places = _places(root)
        container, key = random.choice(places)
        value = container[key]
        way = random.randrange(9)
        if way == 0 and isinstance(container, dict):
            del container[key]
        elif way == 1 and isinstance(value, dict):
            value[random.choice((*keys, *NAMES))] = odd_value(random)
        elif way == 3:
            other, name = random.choice(places)
            container[key] = copy.deepcopy(other[name])
        elif way == 4 and isinstance(value, int | float):
            container[key] = random.choice((-value, value + 1, value - 1, value * 2, str(value)))
        else:
            container[key] = odd_value(random)
    if keys and isinstance(root[0], dict) and random.random() < 0.6:
        root[0][random.choice(keys)] = odd_value(random)
    return root[0]


def _places(root: list[Any]) -> list[tuple[Any, Any]]:
    """Where each value of a document lies: its container, and its key there."""
    found: list[tuple[Any, Any]] = []
    todo: list[Any] = [root]
    while todo:
        inner = todo.pop()
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        for key in keys:
            found.append((inner, key))
            if isinstance(inner[key], dict | list):
                todo.append(inner[key])
    return found[1:] if len(found) > 1 else found


def encode(document: Any) -> bytes:
    """JSON as Python writes it; a lone surrogate stays one."""
    return json.dumps(document).encode()


def spoil_json(random: Random, data: bytes) -> bytes:
    """The text of a JSON object, spoiled beyond its values."""
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: data[: random.randrange(len(data) + 1)],
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data + random.choice((b"x", b"\0", b"{}", b"\n" * 1000, data)),
        lambda: b"[" * random.choice((99, 1000, 100_000)),
        lambda: b'{"a":' * random.choice((99, 101, 5000)) + b"1" + b"}" * 5000,
        lambda: data.replace(b":", b": 1" + b"0" * 5000 + b" ,", 1),
        lambda: data.replace(b"{", b'{"x": ' + b"9" * 4400 + b", ", 1),
        lambda: data.replace(b"{", b'{"x": [' + b"[]," * 2_100_000 + b"1], ", 1),
        lambda: data.replace(b"{", b"{" + b"".join(b'"k%d":1,' % n for n in range(100_000)), 1),
        lambda: data.replace(b"{", b'{"x": "' + b"y" * (17 << 20) + b'", ', 1),
        lambda: data.decode("utf-8", "replace").encode(random.choice(("utf-16", "utf-32"))),
        lambda: data.replace(b'"', b"'"),
        lambda: data.replace(b"{", b"{" + data.strip()[1:-1] + b",", 1),
        lambda: b"" if random.random() < 0.5 else b" " * 4096,
        lambda: spoil(random, data),
    )
    return random.choice(ways)()


def spoil(random: Random, data: bytes) -> bytes:
    """Bytes with a few of them flipped, cut, doubled, put elsewhere or overwritten."""
    changed_data = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        size = len(changed_data)
        if not size:
            return b"\0"
        at, length = random.randrange(size), random.choice((1, 4, 8, 64, 1024))
        way = random.randrange(7)
        if way == 0:
            changed_data[at] ^= 1 << random.randrange(8)
        elif way == 1:
            changed_data[at : at + length] = bytes(min(length, size - at))
        elif way == 2:
            changed_data[at : at + length] = b"\xff" * min(length, size - at)
        elif way == 3:
            del changed_data[at : at + length]
        elif way == 4:
            changed_data[at:at] = changed_data[at : at + length]
        elif way == 5:
            changed_data[at:at] = random.randbytes(length)
        else:
            del changed_data[at:]
    return bytes(changed_data)


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

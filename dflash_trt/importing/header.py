"""The header of a GGUF file, validated in full without touching the weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md — magic, version, counts, keys
with typed values, tensors with their shapes and offsets, then their data, each tensor aligned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.core.files import open_file
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError, first_few, one_line
from dflash_trt.importing.blocks import BlockType, block_types, can_decode
from dflash_trt.importing.cursor import Cursor, Scalar, Value

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 256
MAX_RANK = 4
MAX_DIMENSION = 1 << 40
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20

# A tensor is stated by a name's length, a rank, a dimension, a type and an offset at least.
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_LEAST_FIELD_BYTES = 8 + 4 + 1


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies: `length` bytes at byte `offset` of the file.

    `shape` has the rows first, as in a checkpoint; the file states it the other way round.
    """

    name: str
    kind: BlockType
    shape: tuple[int, ...]
    offset: int
    length: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.shape[-1]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file whose header holds; `tensors` are in the order of their data."""

    path: Path
    size: int
    fields: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]

    def single(self, key: str, default: Scalar | None = None) -> Scalar | None:
        """The value of `key`; DflashError where it is a list of values."""
        value = self.fields.get(key, default)
        if value is None or isinstance(value, Scalar):
            return value
        raise self.error(f"{quoted(key)} must be one value, not a list", "download the file again")

    def error(self, what: str, fix: str | None = None) -> DflashError:
        """An error about the file."""
        return DflashError(what, where=self.path, fix=fix)


def read_gguf(path: str | Path) -> GgufFile:
    """Every key and tensor of `path`.

    Raises:
        DflashError: no regular file; not GGUF, or big-endian, or of another version; or a header
            that lies (counts, lengths, types, shapes, offsets, overlaps, sizes).
    """
    path = Path(path)
    try:
        with open_file(path, named=True) as file:
            size = file.seek(0, 2)
            file.seek(0)
            return _read(Cursor(file, size, path), path, size)
    except (OSError, ValueError) as error:
        raise DflashError(f"cannot be read ({one_line(error)})", where=path) from None


def _read(cursor: Cursor, path: Path, size: int) -> GgufFile:
    _check_preamble(cursor, path)
    num_tensors = cursor.integer(8, "the number of tensors")
    num_fields = cursor.integer(8, "the number of keys")
    for what, count, most, least in (
        ("tensors", num_tensors, MAX_TENSORS, _LEAST_TENSOR_BYTES),
        ("keys", num_fields, MAX_FIELDS, _LEAST_FIELD_BYTES),
    ):
        if count > most or count * least > size:
            raise cursor.corrupt(f"claims {count} {what}, more than it can have")
    fields: dict[str, Value] = {}
    for _ in range(num_fields):
        key, value = cursor.field()
        if key in fields:
            raise cursor.corrupt(f"key {quoted(key)} is given twice")
        fields[key] = value
    alignment = _alignment(fields, cursor)
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        tensor = _read_tensor(cursor, path)
        if tensor.name in tensors:
            raise cursor.corrupt(f"tensor {quoted(tensor.name)} is given twice")
        tensors[tensor.name] = tensor
    if not tensors:
        raise cursor.corrupt("holds no tensors")
    return GgufFile(path, size, fields, _lay_out(tensors, cursor, alignment, size))


def _check_preamble(cursor: Cursor, path: Path) -> None:
    magic = cursor.take(len(MAGIC), "the magic")
    if magic != MAGIC:
        what = f"is not a GGUF file: it begins with {ascii(magic)[1:]}"
        raise DflashError(what, where=path, fix="pass a .gguf file")
    version = cursor.integer(4, "the version")
    if version in VERSIONS:
        return
    if version.to_bytes(4, "little")[:2] == b"\0\0":
        fix = "convert it to little-endian with gguf_convert_endian of the package gguf"
        raise DflashError("is big-endian", where=path, fix=fix)
    fix = f"known are {' and '.join(map(str, VERSIONS))}: convert the model again"
    raise DflashError(f"GGUF version {version} is not known", where=path, fix=fix)


def _alignment(fields: Mapping[str, Value], cursor: Cursor) -> int:
    value = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(value, int) and 1 <= value <= MAX_ALIGNMENT and not value & (value - 1):
        return value
    raise cursor.corrupt(f"general.alignment is {quoted(value)}, not a power of two")


def _read_tensor(cursor: Cursor, path: Path) -> GgufTensor:
    """A tensor whose offset is still counted from the start of the data."""
    name = cursor.text(MAX_NAME_BYTES, "a tensor's name")
    shown = f"tensor {quoted(name)}"
    rank = cursor.integer(4, shown)
    if not 1 <= rank <= MAX_RANK:
        raise cursor.corrupt(f"{shown} has {rank} dimensions, not 1 to {MAX_RANK}")
    sizes = [cursor.integer(8, shown) for _ in range(rank)]
    code, offset = cursor.integer(4, shown), cursor.integer(8, shown)
    if not all(1 <= size <= MAX_DIMENSION for size in sizes):
        raise cursor.corrupt(f"{shown} has a dimension of {first_few([*map(str, sizes)], 4)}")
    kind = block_types().get(code)
    if kind is None or not can_decode(kind):
        name_or_code = code if kind is None else kind.name
        fix = "quantize the model anew in one that is, such as Q8_0"
        raise DflashError(f"{shown}: type {name_or_code} is not decoded", where=path, fix=fix)
    if sizes[0] % kind.elements:
        what = f"rows of {sizes[0]} are no multiple of {kind.name}'s blocks of {kind.elements}"
        raise cursor.corrupt(f"{shown}: {what}")
    length = math.prod(sizes[1:]) * kind.row_bytes(sizes[0])
    return GgufTensor(name, kind, tuple(reversed(sizes)), offset, length)


def _lay_out(
    tensors: Mapping[str, GgufTensor], cursor: Cursor, alignment: int, size: int
) -> dict[str, GgufTensor]:
    """The tensors at their places in the file, which they must fill but for the alignment."""
    start = _align(cursor.position, alignment)
    position = start
    placed: dict[str, GgufTensor] = {}
    for tensor in sorted(tensors.values(), key=lambda one: one.offset):
        shown, offset = f"tensor {quoted(tensor.name)}", start + tensor.offset
        if tensor.offset % alignment:
            raise cursor.corrupt(f"{shown}: offset {tensor.offset} is not aligned to {alignment}")
        if offset < position:
            raise cursor.corrupt(f"{shown} overlaps the one before it by {position - offset} bytes")
        if offset > position:
            raise cursor.corrupt(f"{shown} leaves a hole of {offset - position} bytes before it")
        end = offset + tensor.length
        if end > size:
            raise cursor.corrupt(f"truncated: {shown} ends at byte {end}, the file at {size}")
        position = _align(end, alignment)
        placed[tensor.name] = GgufTensor(
            tensor.name, tensor.kind, tensor.shape, offset, tensor.length
        )
    if size > position:
        raise cursor.corrupt(f"has {size - position} bytes after its last tensor")
    return placed


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment

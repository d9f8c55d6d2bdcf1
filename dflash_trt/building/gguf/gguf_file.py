"""Reads GGUF files with llama.cpp's `gguf` package, which trusts every size that a file states.

So sizes are bounded here before the package allocates, and whatever it raises is one DflashError.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.core.files import open_file
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError, one_line
from dflash_trt.quantization.codecs import Float32

MAX_HEADER_BYTES = 64 << 20
MAX_COUNT = 1 << 16
"""Keys of a file, and tensors."""
AGAIN = "download the file again"

Scalar = int | float | bool | str
Value = Scalar | list[str] | npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies: `length` bytes at byte `offset` of the file.

    `shape` has the rows first, as in a checkpoint; the file states it the other way round.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    length: int

    @property
    def row_bytes(self) -> int:
        return self.length * self.shape[-1] // math.prod(self.shape)


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
        raise self.error(f"{quoted(key)} must be one value, not a list", AGAIN)

    def error(self, what: str, fix: str | None = None) -> DflashError:
        """An error about the file."""
        return DflashError(what, where=self.path, fix=fix)


def read_gguf(path: str | Path) -> GgufFile:
    """Reads every key of `path`, and where its tensors lie.

    Raises:
        DflashError: no regular file; not GGUF, or big-endian, or of another version; or a header
            that lies (counts, lengths, types, shapes, offsets, overlaps, sizes).
    """
    path = Path(path)
    kind = _bounded_reader()
    with open_file(path, named=True) as file:
        size, head = os.fstat(file.fileno()).st_size, file.read(24)
        if not head.startswith(b"GGUF"):
            what = f"is not a GGUF file: it begins with {ascii(head[:4])[1:]}"
            raise DflashError(what, where=path, fix="pass a .gguf file")
        if len(head) == 24 and not head[4] and not head[5]:
            fix = "convert it to little-endian with gguf_convert_endian of the package gguf"
            raise DflashError("is big-endian", where=path, fix=fix)
        try:
            if max(counts := struct.unpack("<8xQQ", head)) > MAX_COUNT:
                raise ValueError(f"claims {counts[0]} tensors and {counts[1]} keys")
            reader = kind(file)
            own = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")  # the package's keys
            stated = {key: one for key, one in reader.fields.items() if key not in own}
            fields = {key: _value(field) for key, field in stated.items()}
            return GgufFile(path, size, fields, _place(reader, size))
        except Exception as error:  # whatever the package ends in
            what = f"cannot be read ({type(error).__name__}: {one_line(error, 200)})"
            raise DflashError(what, where=path, fix=AGAIN) from None


@cache
def decoded_types() -> Mapping[int, tuple[str, int, int]]:
    """Types that hold weights, by code: the name, and a block's elements and bytes.

    Raises:
        DflashError: the package `gguf` cannot be imported.
    """
    gguf, found = gguf_package(), {}
    for kind, (elements, size) in gguf.GGML_QUANT_SIZES.items():
        with suppress(NotImplementedError), np.errstate(all="ignore"):
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
            found[int(kind)] = kind.name, elements, size
    return found


def decode(data: bytes, source: GgufTensor) -> Float32:
    """Decodes whole rows of a tensor; damaged blocks may give NaN and infinities."""
    gguf, rows = gguf_package(), np.frombuffer(data, np.uint8).reshape(-1, source.row_bytes)
    with np.errstate(all="ignore"):
        values: Float32 = gguf.dequantize(rows, gguf.GGMLQuantizationType[source.kind])
    return values.reshape(-1, source.shape[-1])


def gguf_package() -> Any:
    """The package `gguf`; DflashError where it cannot be imported."""
    try:
        return import_module("gguf")
    except ImportError as error:
        what = f"reading GGUF needs the package gguf, which cannot be imported ({error})"
        raise DflashError(what, fix="pip install 'dflash-trt[gguf]'") from error


@cache
def _bounded_reader() -> type[Any]:
    gguf = gguf_package()

    class BoundedReader(gguf.GGUFReader):  # type: ignore[name-defined, misc]
        """Reads no further than the header, arrays at once, and no tensor's data."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self._check(offset + np.dtype(dtype).itemsize * int(count))
            return super()._get(offset, dtype, count, override_order)

        def _check(self, end: int) -> None:
            if end > min(len(self.data), MAX_HEADER_BYTES):
                raise ValueError(f"truncated: its header ends at byte {end} at least")

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, Any, Any, Any]:
            if raw_type != gguf.GGUFValueType.ARRAY:
                parts: tuple[int, Any, Any, Any] = super()._get_field_parts(orig_offs, raw_type)
                return parts
            kind = gguf.GGUFValueType(self._get(orig_offs, np.uint32)[0])
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            end = orig_offs + 12
            if kind == gguf.GGUFValueType.STRING:
                values, data = list[str](), memoryview(self.data)
                for _ in range(count):
                    start = end + 8
                    self._check(end := start + int.from_bytes(data[end:start], "little"))
                    values.append(str(data[start:end], "utf-8"))
            else:  # no known key is an array of arrays: they have no type here
                values = self._get(end, self.gguf_scalar_to_np[kind], count)
                end += values.nbytes
            return end - orig_offs, [values], [0], [gguf.GGUFValueType.ARRAY, kind]

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            self.data_offset, self.tensor_fields = int(start_offs), fields

    return BoundedReader


def _value(field: Any) -> Value:
    kind, value = field.types[0].name, field.parts[-1]
    if kind == "STRING":
        return str(bytes(value), "utf-8")
    if kind == "ARRAY":
        return value if isinstance(value, list) else np.array(value)
    if not np.isfinite(value[0]) or (kind == "BOOL" and value.view(np.uint8)[0] > 1):
        raise ValueError(f"{quoted(field.name)} is {value[0]}")
    # A float's shortest decimal: 1e-05, not float32's 9.999999747378752e-06.
    number: Scalar = float(str(value[0])) if kind.startswith("FLOAT") else value[0].item()
    return number


def _place(reader: Any, size: int) -> dict[str, GgufTensor]:
    """The tensors at their places in the file, which they must fill but for the alignment."""
    types, alignment, placed = decoded_types(), int(reader.alignment), dict[str, GgufTensor]()
    position = int(reader.data_offset)
    for field in sorted(reader.tensor_fields, key=lambda one: int(one.parts[5][0])):
        shown, sizes = f"tensor {quoted(field.name)}", [int(one) for one in field.parts[3]]
        code, offset = int(field.parts[4][0]), reader.data_offset + int(field.parts[5][0])
        if code not in types:
            raise ValueError(f"{shown}: type {code} is not decoded; quantize it in Q8_0, say")
        kind, elements, block_bytes = types[code]
        if not sizes or not all(sizes) or sizes[0] % elements:
            raise ValueError(f"{shown}: sizes {one_line(sizes, 60)} in {kind} blocks of {elements}")
        if field.name in placed or offset != position:
            raise ValueError(f"{shown} is given twice, or begins at {offset}, not {position}")
        length = math.prod(sizes) // elements * block_bytes
        if offset + length > size:
            raise ValueError(f"truncated: {shown} ends at {offset + length}, the file at {size}")
        position = -(-(offset + length) // alignment) * alignment
        placed[field.name] = GgufTensor(field.name, kind, tuple(sizes[::-1]), offset, length)
    if size > position or not placed:
        raise ValueError(f"has {len(placed)} tensors and {size - position} bytes after the last")
    return placed

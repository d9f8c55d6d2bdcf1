"""The header of a .safetensors file, validated in full without touching the weights.

Format: https://github.com/huggingface/safetensors#format — 8 bytes little-endian header
length, a JSON object name → {dtype, shape, data_offsets}, then the data, without holes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.core.files import open_file, resolved
from dflash_trt.core.strict_json import parse_json, quoted
from dflash_trt.errors import DflashError, one_line

MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 32
MAX_DIMENSION = 2**63 - 1
LENGTH_PREFIX_BYTES = 8

ITEM_BYTES = {
    code: size
    for size, codes in {
        1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
        2: "U16 I16 F16 BF16",
        4: "U32 I32 F32",
        8: "U64 I64 F64 C64",
    }.items()
    for code in codes.split()
}
"""Bytes per element of each dtype code that is understood (whole bytes only)."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `length` bytes at byte `offset` of `file`.

    `dtype` is the safetensors code ("F32", "BF16", …); `file` is resolved, so a hub blob where the
    snapshot is made of symlinks.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    length: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def pieces(self, size: int) -> Iterator[bytes]:
        """The tensor's bytes, `size` at a time and what is left at the end.

        Raises DflashError when the file has become shorter than its header says.
        """
        with open_file(self.file) as file:
            file.seek(self.offset)
            for start in range(0, self.length, size):
                wanted = min(size, self.length - start)
                data = file.read(wanted)
                if len(data) < wanted:
                    what = f"ends inside tensor {quoted(self.name)}; it changed while it was read"
                    raise DflashError(what, where=self.file)
                yield data

    def error(self, what: str, fix: str) -> DflashError:
        """An error that names the tensor and its file."""
        return DflashError(f"tensor {quoted(self.name)}: {what}", where=self.file, fix=fix)


def read_header(path: str | Path) -> dict[str, TensorEntry]:
    """Every tensor of `path` by name, in file order.

    Raises:
        DflashError: the file is truncated, or its header lies (length, JSON, dtype, shape,
            offsets, holes, overlaps, bytes of no tensor).
    """
    path = Path(path)
    raw, file_size = _read_raw_header(path)
    header = parse_json(raw[LENGTH_PREFIX_BYTES:], path)
    if not isinstance(header, dict):
        raise _corrupt(path, f"header must be a JSON object, not {type(header).__name__}")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _corrupt(path, "__metadata__ must map text to text")
    data_start = len(raw)
    real = resolved(path)
    entries = [_entry(name, fields, path, real, data_start) for name, fields in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.length))
    _check_layout(entries, path, data_start, file_size)
    return {entry.name: entry for entry in entries}


def header_sha256(path: str | Path) -> str:
    """Hex sha256 of the header bytes, the 8 length bytes included; errors as `read_header`."""
    raw, _ = _read_raw_header(Path(path))
    return hashlib.sha256(raw).hexdigest()


def _read_raw_header(path: Path) -> tuple[bytes, int]:
    """The length prefix and header as stored, and the file's size; nothing is parsed."""
    try:
        with open_file(path) as file:
            file_size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(LENGTH_PREFIX_BYTES)
            if len(prefix) < LENGTH_PREFIX_BYTES:
                raise _corrupt(path, f"only {file_size} bytes, too short for a safetensors file")
            length = int.from_bytes(prefix, "little")
            # Both limits come before the read, so a lying length allocates nothing.
            if length > MAX_HEADER_BYTES:
                what = f"header claims {length} bytes, over the limit of {MAX_HEADER_BYTES}"
                raise _corrupt(path, what)
            follow = file_size - LENGTH_PREFIX_BYTES
            if length > follow:
                what = f"header claims {length} bytes but only {follow} follow its length"
                raise _corrupt(path, f"truncated: {what}")
            header = file.read(length)
    except (OSError, ValueError) as error:
        raise DflashError(f"cannot be read ({one_line(error)})", where=path) from None
    if len(header) < length:
        raise _corrupt(path, f"header ends after {len(header)} of {length} bytes")
    return prefix + header, file_size


def _entry(name: str, fields: Any, path: Path, resolved: Path, data_start: int) -> TensorEntry:
    where = f"{path} tensor {quoted(name)}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise _corrupt(where, "must have exactly dtype, shape and data_offsets")
    dtype = fields["dtype"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        fix = f"supported are {', '.join(ITEM_BYTES)}"
        raise DflashError(f"dtype {quoted(dtype)} is not supported", where=where, fix=fix)
    shape = _sizes(fields["shape"], where, "shape", MAX_RANK)
    offsets = _sizes(fields["data_offsets"], where, "data_offsets", 2)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _corrupt(where, f"data_offsets {list(offsets)} must be [begin, end], begin <= end")
    begin, end = offsets
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != expected:
        what = f"shape {list(shape)} of {dtype} needs {expected} bytes"
        raise _corrupt(where, f"{what}, data_offsets give {end - begin}")
    return TensorEntry(name, dtype, shape, resolved, data_start + begin, expected)


def _sizes(value: Any, where: str, key: str, limit: int) -> tuple[int, ...]:
    """`value` as sizes; Python's bool is an int, JSON's is not a size."""
    if not isinstance(value, list) or len(value) > limit:
        raise _corrupt(where, f"{key} must be a list of at most {limit} sizes")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_DIMENSION:
            raise _corrupt(where, f"{key} has {quoted(item)}, not a size from 0 to 2^63-1")
    return tuple(value)


def _check_layout(entries: list[TensorEntry], path: Path, data_start: int, file_size: int) -> None:
    """The tensors must tile the data exactly: every byte of the file belongs to one tensor."""
    position, previous = data_start, ""
    for entry in entries:
        where, gap = f"{path} tensor {quoted(entry.name)}", entry.offset - position
        if gap < 0:
            raise _corrupt(where, f"overlaps tensor {quoted(previous)} by {-gap} bytes")
        if gap > 0:
            raise _corrupt(where, f"leaves a hole of {gap} bytes before it")
        position, previous = entry.offset + entry.length, entry.name
    if position > file_size:
        raise _corrupt(path, f"truncated: {position - file_size} of {position} bytes are missing")
    if position < file_size:
        raise _corrupt(path, f"has {file_size - position} bytes after its last tensor")


def _corrupt(where: str | Path, what: str) -> DflashError:
    return DflashError(what, where=where, fix="download the file again")

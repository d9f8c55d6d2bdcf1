"""Tensors of checkpoints: read as float32 some rows at a time, and written in pieces."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError
from dflash_trt.models.safetensors_header import ITEM_BYTES, TensorEntry
from dflash_trt.quantization.codecs import Float32

# What fits a core's cache with everything computed from it; one row where rows are longer.
CHUNK_ELEMENTS = 1 << 17


def iterate_rows(entry: TensorEntry) -> Iterator[Float32]:
    """The rows of a matrix in F32, BF16 or F16, as float32 [some, columns], from first to last.

    Raises DflashError when the file has become shorter than its header says.
    """
    columns = entry.shape[1]
    rows = max(1, CHUNK_ELEMENTS // columns)
    for data in entry.pieces(rows * columns * ITEM_BYTES[entry.dtype]):
        yield _decode(data, entry.dtype).reshape(-1, columns)


def largest_magnitude(entry: TensorEntry, on_bytes: Callable[[int], None]) -> float:
    """The largest |value| of a matrix; DflashError when it holds an infinity or NaN."""
    largest = np.float32(0)
    for values in iterate_rows(entry):
        # Two reductions and no temporary; NaN passes through both.
        largest = np.maximum(largest, np.maximum(values.max(), -values.min()))
        on_bytes(values.size * ITEM_BYTES[entry.dtype])
    if not np.isfinite(largest):
        raise DflashError(
            f"tensor {quoted(entry.name)} holds NaN or infinities",
            where=entry.file,
            fix="such a checkpoint cannot be quantized, nor used",
        )
    return float(largest)


def sum_of_squares(values: Float32) -> float:
    """Of a matrix, in double precision: squares near float32's ends would overflow or vanish."""
    doubles = values.astype(np.float64)
    return float(np.einsum("ij,ij->", doubles, doubles))  # one thread, unlike np.dot


def _decode(data: bytes, dtype: str) -> Float32:
    if dtype == "F32":
        return np.frombuffer(data, "<f4")
    if dtype == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    words: npt.NDArray[np.uint16] = np.frombuffer(data, "<u2")
    bits = words.astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)


_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor to write: `dtype` is the safetensors code."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class ShardWriter:
    """A file of `tensors`, whose pieces come in any order; see `open_shard`."""

    def __init__(self, file: BinaryIO, tensors: Iterable[TensorLayout]) -> None:
        ordered = _ordered(tensors)
        header = shard_header(ordered)
        ends = [len(header), *(tensor.num_bytes for tensor in ordered)]
        self._next = dict(zip((one.name for one in ordered), accumulate(ends), strict=False))
        self._file = file
        self._file.write(header)

    def write(self, name: str, data: bytes | npt.NDArray[Any]) -> None:
        """The next piece of tensor `name`."""
        piece = data if isinstance(data, bytes) else np.ascontiguousarray(data).data.cast("B")
        self._file.seek(self._next[name])
        self._file.write(piece)
        self._next[name] += len(piece)


@contextmanager
def open_shard(path: Path, tensors: Iterable[TensorLayout]) -> Iterator[ShardWriter]:
    """Writes a file of `tensors`, whole and on disk when the context ends without an error.

    Wide types come first, so that every tensor is aligned to its own type.
    """
    with path.open("wb") as file:
        yield ShardWriter(file, tensors)
        file.flush()
        os.fsync(file.fileno())  # a resumed run trusts it, after a power failure too


def shard_bytes(tensors: Iterable[TensorLayout]) -> int:
    """The size of the file that `open_shard` makes of `tensors`."""
    ordered = _ordered(tensors)
    return len(shard_header(ordered)) + sum(tensor.num_bytes for tensor in ordered)


def _ordered(tensors: Iterable[TensorLayout]) -> list[TensorLayout]:
    return sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])


def shard_header(tensors: Iterable[TensorLayout]) -> bytes:
    """The length prefix and the JSON, padded so that the data begins aligned."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.num_bytes
        fields[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    encoded = json.dumps(fields, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    return len(encoded).to_bytes(8, "little") + encoded

"""Writes one .safetensors file, whose tensors come in pieces in any order."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoints.safetensors_header import ITEM_BYTES

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
        self._ends: dict[str, int] = {}
        self._next: dict[str, int] = {}
        position = len(header)
        for tensor in ordered:
            self._next[tensor.name] = position
            position += tensor.num_bytes
            self._ends[tensor.name] = position
        self._file = file
        self._file.write(header)
        self._position = len(header)

    def write(self, name: str, data: bytes | npt.NDArray[Any]) -> None:
        """The next piece of tensor `name`."""
        piece = data if isinstance(data, bytes) else np.ascontiguousarray(data).data.cast("B")
        start = self._next[name]
        if start + len(piece) > self._ends[name]:
            raise ValueError(f"{name}: more bytes than its shape has")
        if start != self._position:
            self._file.seek(start)
        self._file.write(piece)
        self._position = self._next[name] = start + len(piece)

    def check(self) -> None:
        """Raises ValueError where a tensor lacks bytes."""
        short = [name for name, position in self._next.items() if position < self._ends[name]]
        if short:
            raise ValueError(f"{short[0]}: fewer bytes than its shape has")


@contextmanager
def open_shard(path: Path, tensors: Iterable[TensorLayout]) -> Iterator[ShardWriter]:
    """Writes a file of `tensors`, whole and on disk when the context ends without an error.

    Wide types come first, so that every tensor is aligned to its own type.
    """
    with path.open("wb") as file:
        writer = ShardWriter(file, tensors)
        yield writer
        writer.check()
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

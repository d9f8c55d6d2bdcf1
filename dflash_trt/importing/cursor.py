"""Reads the values of a GGUF header one after another, none before its size is known to fit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError

MAX_HEADER_BYTES = 64 << 20
MAX_KEY_BYTES = 65_535
MAX_TEXT_BYTES = 16 << 20

_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4"} | {
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _TEXT, _ARRAY = 7, 8, 9
_LENGTH_BYTES = 8

Scalar = int | float | bool | str
Value = Scalar | list[str] | npt.NDArray[Any]
"""A text array is a list; one of numbers keeps its type, bools as uint8."""


class Cursor:
    """A place in the header of `file`, which has `size` bytes."""

    def __init__(self, file: BinaryIO, size: int, where: Path) -> None:
        self.position = 0
        self._file, self._size, self._where = file, size, where

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes; DflashError before reading where the header cannot hold them."""
        end = min(self._size, MAX_HEADER_BYTES)
        if count > end - self.position:
            if self._size > end:
                raise self.corrupt(f"{what} leads past {MAX_HEADER_BYTES} bytes of header")
            left = self._size - self.position
            raise self.corrupt(f"truncated: {what} has {count} bytes, {left} are left")
        data = self._file.read(count)
        if len(data) < count:
            raise self.corrupt(f"truncated: it ends inside {what}")
        self.position += count
        return data

    def integer(self, size: int, what: str) -> int:
        """An unsigned integer of `size` bytes."""
        return int.from_bytes(self.take(size, what), "little")

    def text(self, limit: int, what: str) -> str:
        """UTF-8 of at most `limit` bytes."""
        length = self.integer(_LENGTH_BYTES, what)
        if length > limit:
            raise self.corrupt(f"{what} has {length} bytes, over the limit of {limit}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{what} is not UTF-8 (byte {error.start})") from None

    def field(self) -> tuple[str, Value]:
        """A key and its value."""
        key = self.text(MAX_KEY_BYTES, "a key")
        kind = self.integer(4, f"the type of {quoted(key)}")
        return key, self._array(key) if kind == _ARRAY else self._single(kind, key)

    def corrupt(self, what: str) -> DflashError:
        """An error about the file as a whole."""
        return DflashError(what, where=self._where, fix="download the file again")

    def _single(self, kind: int, key: str) -> Scalar:
        shown = quoted(key)
        if kind == _TEXT:
            return self.text(MAX_TEXT_BYTES, shown)
        if kind == _BOOL:
            byte = self.integer(1, shown)
            if byte > 1:
                raise self.corrupt(f"{shown} is {byte}, not a bool")
            return bool(byte)
        code = self._scalar_code(kind, shown)
        value = np.frombuffer(self.take(np.dtype(code).itemsize, shown), code)[0]
        if code != "<f4" and code != "<f8":
            return int(value)
        # The shortest decimal that stands for it: 1e-05, not float32's 9.999999747378752e-06.
        number = float(str(value))
        if not math.isfinite(number):
            raise self.corrupt(f"{shown} is {number}")
        return number

    def _array(self, key: str) -> Value:
        shown = quoted(key)
        kind = self.integer(4, shown)
        count = self.integer(_LENGTH_BYTES, shown)
        if kind == _ARRAY:
            raise self.corrupt(f"{shown} is an array of arrays, which no known key is")
        if kind == _TEXT:
            self._check_count(count, _LENGTH_BYTES, shown)
            return [self.text(MAX_TEXT_BYTES, shown) for _ in range(count)]
        code = "<u1" if kind == _BOOL else self._scalar_code(kind, shown)
        size = np.dtype(code).itemsize
        self._check_count(count, size, shown)
        return np.frombuffer(self.take(count * size, shown), code)

    def _check_count(self, count: int, least: int, shown: str) -> None:
        """Refuses more items than what is left can hold, before the first is read."""
        left = min(self._size, MAX_HEADER_BYTES) - self.position
        if count * least > left:
            raise self.corrupt(f"{shown} claims {count} items, {left} bytes are left")

    def _scalar_code(self, kind: int, shown: str) -> str:
        if kind not in _SCALARS:
            raise self.corrupt(f"{shown} has the unknown type {kind}")
        return _SCALARS[kind]

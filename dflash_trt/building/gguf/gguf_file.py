"""Reads GGUF files with llama.cpp's `gguf` package, which trusts every size that a file states.

So a read past the header's bound is an error here, and whatever the package raises is one
DflashError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.core.files import open_file
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError, import_extra, one_line
from dflash_trt.quantization.codecs import Float32

MAX_HEADER_BYTES = 32 << 20
AGAIN = "download the file again"

Scalar = int | float | bool | str
Value = Scalar | list[Any]


@dataclass(frozen=True, slots=True, eq=False)
class GgufTensor:
    """One tensor: its `rows` as they lie in the file, of values or of the bytes of blocks.

    `shape` has the rows first, as in a checkpoint; the file states it the other way round.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    rows: npt.NDArray[Any]

    def decode(self, first: int, last: int) -> Float32:
        """The values of some rows; damaged blocks may give NaN and infinities."""
        gguf = gguf_package()
        with np.errstate(all="ignore"):
            kind = gguf.GGMLQuantizationType[self.kind]
            values: Float32 = gguf.dequantize(self.rows[first:last], kind)
        return values.reshape(-1, self.shape[-1])


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
    """Reads every key of `path`, and maps its tensors.

    Raises:
        DflashError: no regular file; not GGUF, or big-endian, or of another version; or a header
            that lies (counts, lengths, types, shapes, offsets).
    """
    path, gguf = Path(path), gguf_package()

    class BoundedReader(gguf.GGUFReader):  # type: ignore[name-defined, misc]
        """Reads no further than the file, nor its header than any header goes."""

        _most = MAX_HEADER_BYTES

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            # Slices of an array cost less than a memmap's.
            self.data: npt.NDArray[np.uint8] = np.asarray(self.data)
            end = offset + np.dtype(dtype).itemsize * int(count)
            if not 0 <= offset <= end <= min(len(self.data), self._most):
                raise ValueError(f"truncated: it needs {end} bytes at least")
            return super()._get(offset, dtype, count, override_order)

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            self._most = len(self.data)
            super()._build_tensors(start_offs, fields)

    with open_file(path, named=True) as file:
        head = file.read(4)
        if head != b"GGUF":
            what = f"is not a GGUF file: it begins with {ascii(head)[1:]}"
            raise DflashError(what, where=path, fix="pass a .gguf file")
        try:
            with np.errstate(all="ignore"):
                reader = BoundedReader(file)
                for kind in {one.tensor_type for one in reader.tensors}:  # those that are decoded
                    gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            if reader.byte_order != "I":
                raise ValueError("big-endian; convert it with the package's gguf_convert_endian")
            fields = {key: _value(field) for key, field in reader.fields.items()}
            tensors = {
                one.name: GgufTensor(
                    one.name,
                    one.tensor_type.name,
                    tuple(int(size) for size in one.shape[::-1]),
                    one.data.reshape(-1, one.data.shape[-1]),
                )
                for one in sorted(reader.tensors, key=lambda one: one.data_offset)
            }
            return GgufFile(path, len(reader.data), fields, tensors)
        except Exception as error:  # whatever the package ends in
            what = f"cannot be read ({type(error).__name__}: {one_line(error, 200)})"
            raise DflashError(what, where=path, fix=AGAIN) from None


def gguf_package() -> Any:
    """The package `gguf`; DflashError where it cannot be imported."""
    return import_extra("gguf", "gguf", "reading a GGUF file")


def _value(field: Any) -> Value:
    value: Value = field.contents()
    # A float's shortest decimal: 1e-05, not float32's 9.999999747378752e-06.
    return float(str(field.parts[-1][0])) if isinstance(value, float) else value

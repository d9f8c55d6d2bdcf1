"""A checkpoint's tensor as float32, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoints.safetensors_header import ITEM_BYTES, TensorEntry
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError
from dflash_trt.quantization.formats import Float32

READABLE_DTYPES = ("F32", "F16", "BF16")

# What fits a core's cache with everything computed from it; one row where rows are longer.
CHUNK_ELEMENTS = 1 << 17


def iterate_rows(entry: TensorEntry) -> Iterator[Float32]:
    """The rows of a matrix in F32, BF16 or F16, as float32 [some, columns], from first to last.

    Raises DflashError when the file has become shorter than its header says.
    """
    rows, columns = entry.shape
    step = max(1, CHUNK_ELEMENTS // max(columns, 1))
    row_bytes = columns * ITEM_BYTES[entry.dtype]
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            data = file.read(count * row_bytes)
            if len(data) < count * row_bytes:
                what = f"ends inside tensor {quoted(entry.name)}; it changed while it was read"
                raise DflashError(what, where=entry.file)
            yield _decode(data, entry.dtype).reshape(count, columns)


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


def _decode(data: bytes, dtype: str) -> Float32:
    if dtype == "F32":
        return np.frombuffer(data, "<f4")
    if dtype == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    words: npt.NDArray[np.uint16] = np.frombuffer(data, "<u2")
    bits = words.astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)

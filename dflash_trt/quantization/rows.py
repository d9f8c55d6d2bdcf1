"""A checkpoint's tensor as float32, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoints.safetensors_header import ITEM_BYTES, TensorEntry
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError
from dflash_trt.quantization.formats import Float32

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

"""How GGUF stores numbers: blocks of a row, each with its own scales; sizes and decoding.

Both come from the `gguf` package, which llama.cpp's authors keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from dflash_trt.errors import DflashError
from dflash_trt.quantization.codecs import Float32


@dataclass(frozen=True, slots=True)
class BlockType:
    """`elements` neighbours of a row take `num_bytes`; "F32" and the like have blocks of one."""

    code: int
    name: str
    elements: int
    num_bytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row; `columns` is a multiple of `elements`."""
        return columns // self.elements * self.num_bytes


@cache
def block_types() -> Mapping[int, BlockType]:
    """Every type that a file may state, by its code; DflashError without the `gguf` package."""
    constants = _library("gguf.constants")
    return {
        int(kind): BlockType(int(kind), kind.name, *constants.GGML_QUANT_SIZES[kind])
        for kind in constants.GGMLQuantizationType
        if kind in constants.GGML_QUANT_SIZES
    }


@cache
def can_decode(kind: BlockType) -> bool:
    """Whether `decode` knows the type: those that hold weights."""
    try:
        decode(bytes(kind.num_bytes), kind, kind.elements)
    except NotImplementedError:
        return False
    return True


def decode(data: bytes, kind: BlockType, columns: int) -> Float32:
    """Whole rows as float32 [rows, columns]; damaged blocks may give NaN and infinities.

    Raises:
        NotImplementedError: the package does not decode this type.
    """
    quants = _library("gguf.quants")
    code = _library("gguf.constants").GGMLQuantizationType(kind.code)
    rows = np.frombuffer(data, np.uint8).reshape(-1, kind.row_bytes(columns))
    with np.errstate(all="ignore"):
        values: Float32 = quants.dequantize(rows, code)
    return values.reshape(-1, columns)


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise DflashError(
            f"reading GGUF needs the package gguf, which cannot be imported ({error})",
            fix="pip install 'dflash-trt[gguf]'",
        ) from error

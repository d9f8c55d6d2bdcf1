"""Eight-bit copies of a model's matrices, which the CPU executor multiplies by in their place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.core.formats import INT8_BLOCK, INT8_COLUMNS
from dflash_trt.core.progress import Progress
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError
from dflash_trt.models.decoder import DecoderSpec
from dflash_trt.models.quantized_weights import FLOAT_DTYPES, quantized_linears
from dflash_trt.models.safetensors_header import ITEM_BYTES, TensorEntry
from dflash_trt.models.target import TargetSpec
from dflash_trt.quantization.codecs import quantize_int8
from dflash_trt.quantization.linears import EMBEDDING, FC, LAYER_LINEARS, LM_HEAD
from dflash_trt.quantization.tensor_rows import TensorLayout, iterate_rows, open_shard

INT8_PARTS = ("codes", "steps", "zeros")
"""What a matrix [N,K] becomes: U8 [N,K/32,32], F32 [N,K/32] and U8 [N,K/32]."""
EXPERTS = ".experts."
MARKOV_W2 = "markov_w2"


@dataclass(frozen=True, slots=True)
class Int8Selection:
    """By role the matrices that get a copy; `kept` are roles of other products, in floats."""

    matrices: Mapping[str, TensorEntry]
    kept: tuple[str, ...]


def select_int8(spec: DecoderSpec) -> Int8Selection:
    """The matrices of a model that get an eight-bit copy: its linears, and what makes its logits.

    Raises:
        DflashError: linears that are in FP8 or NVFP4.
    """
    if quantized := quantized_linears(spec.weights):
        kinds = ", ".join({*quantized.values()})
        what = f"is quantized already: {len(quantized)} linears are in {kinds}"
        fix = "build it as it is, or pass the checkpoint that it was made of"
        raise DflashError(what, where=spec.checkpoint.path, fix=fix)
    is_tied = isinstance(spec, TargetSpec) and LM_HEAD not in spec.weights
    names = {*LAYER_LINEARS, FC, LM_HEAD, MARKOV_W2, *[EMBEDDING] * is_tied}
    wanted = {role: one for role, one in spec.weights.items() if role.rpartition(".")[2] in names}
    wanted = dict(sorted(wanted.items(), key=lambda one: _place(one[0])))
    matrices = {role: one for role, one in wanted.items() if has_int8(one)}
    kept = {role for role in wanted if role not in matrices}
    # A loop takes one expert after another; ONNX Runtime packs constant eight-bit matrices alone.
    kept |= {role[: role.index(EXPERTS)] + EXPERTS[:-1] for role in spec.weights if EXPERTS in role}
    return Int8Selection(matrices, tuple(sorted(kept)))


def _place(role: str) -> tuple[str, int]:
    """Where a copy lies in its file: beside those of one input, for graphs to read as one."""
    layer, _, linear = role.rpartition(".")
    return layer, LAYER_LINEARS.index(linear) if linear in LAYER_LINEARS else 0


def has_int8(entry: TensorEntry) -> bool:
    """Whether a matrix can have a copy: it has whole blocks, and is no wider than any known one."""
    columns = entry.shape[1]
    return entry.dtype in FLOAT_DTYPES and columns <= INT8_COLUMNS and columns % INT8_BLOCK == 0


def int8_bytes(matrices: Collection[TensorEntry]) -> int:
    """What the copies of `matrices` take."""
    return sum(part.num_bytes for one in matrices for part in _layouts("", one))


def write_int8(path: Path, matrices: Mapping[str, TensorEntry], progress: Progress) -> None:
    """Writes a file with the copy of each matrix, whose parts are NAME.codes and so on.

    Raises:
        DflashError: a weight that is not finite.
    """
    progress.stage("quantizing to INT8", sum(entry.length for entry in matrices.values()))
    # Codes beside codes, zeros beside zeros.
    kinds = zip(*(_layouts(name, entry) for name, entry in matrices.items()), strict=True)
    with open_shard(path, chain.from_iterable(kinds)) as shard:
        for name, entry in matrices.items():
            for rows in iterate_rows(entry):
                if not np.isfinite(rows).all():
                    what = f"tensor {quoted(entry.name)} holds NaN or infinities"
                    raise DflashError(what, where=entry.file, fix="it cannot be used")
                parts: tuple[npt.NDArray[Any], ...] = quantize_int8(rows)
                for part, values in zip(INT8_PARTS, parts, strict=True):
                    shard.write(f"{name}.{part}", values)
                progress.advance(rows.size * ITEM_BYTES[entry.dtype])


def _layouts(name: str, entry: TensorEntry) -> list[TensorLayout]:
    rows, columns = entry.shape
    shape = (rows, columns // INT8_BLOCK)
    kinds = (("U8", (*shape, INT8_BLOCK)), ("F32", shape), ("U8", shape))
    return [
        TensorLayout(f"{name}.{part}", *kind) for part, kind in zip(INT8_PARTS, kinds, strict=True)
    ]

"""A checkpoint's tensors, each with the rows of a GGUF file that it is made of.

Shapes: N rows, C columns, D head size.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from dflash_trt.checkpoints.families import target_rules
from dflash_trt.checkpoints.name_map import size_of
from dflash_trt.checkpoints.weight_names import HARMLESS_SUFFIXES
from dflash_trt.core.files import open_file
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import first_few
from dflash_trt.importing.architectures import ROPE_FACTORS, TENSORS
from dflash_trt.importing.blocks import decode
from dflash_trt.importing.config import ModelConfig
from dflash_trt.importing.header import GgufFile, GgufTensor
from dflash_trt.quantization.codecs import Float32
from dflash_trt.quantization.tensors import CHUNK_ELEMENTS

_TURNED = ("q_proj", "k_proj", "q_proj.bias", "k_proj.bias")
_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class WeightOrigin:
    """The tensor `name` of a checkpoint and its source: `shape` elements from byte `offset` on.

    The rows of each of its heads are in llama.cpp's order where `turned_head` gives their size D.
    """

    name: str
    shape: tuple[int, ...]
    source: GgufTensor
    offset: int
    turned_head: int | None

    @property
    def length(self) -> int:
        """Bytes in the GGUF file."""
        return self.source.length * math.prod(self.shape) // self.source.num_elements


def find_origins(file: GgufFile, config: ModelConfig, vocab: int) -> list[WeightOrigin]:
    """Every tensor that a checkpoint of `config` has, in the order of the file's data.

    Raises:
        DflashError: tensors are missing, wrongly shaped, or would not be used.
    """
    rules = target_rules(
        config.architecture.family, attention_bias=config.attention_bias, tied=config.tied
    )
    layers = len(config.sizes.layers)
    if layers > len(file.tensors):
        raise file.error(f"states {layers} layers and has {len(file.tensors)} tensors")
    symbols = {**config.symbols, "vocab": vocab}
    origins: list[WeightOrigin] = []
    missing: list[str] = []
    misshapen: list[str] = []
    for role, (name, terms) in rules.items():
        pattern, is_part = TENSORS[role].removesuffix("[{e}]"), TENSORS[role].endswith("[{e}]")
        shape = tuple(int(size_of(term, symbols)) for term in terms)
        parts = symbols["experts"] if is_part else 1
        stored = (parts, *shape) if is_part else shape
        turned = config.architecture.has_turned_heads and role.endswith(_TURNED)
        for i in range(layers) if "{i}" in role else range(1):
            source = file.tensors.get(pattern.format(i=i))
            if source is None:
                missing.append(pattern.format(i=i))
                continue
            if source.shape != stored:
                misshapen.append(f"{source.name} is {list(source.shape)}, not {list(stored)}")
                continue
            step = source.length // parts
            head = config.sizes.layer.head_dim if turned else None
            origins += [
                WeightOrigin(name.format(i=i, e=e), shape, source, source.offset + e * step, head)
                for e in range(parts)
            ]
    unused: list[str] = []
    if not missing and not misshapen:  # else what is left is of no interest
        used = {origin.source.name for origin in origins} | {ROPE_FACTORS}
        unused = [
            name
            for name in file.tensors
            if name not in used and not name.endswith(HARMLESS_SUFFIXES)
        ]
    problems = [
        _listed("missing", missing),
        _listed("of another shape", misshapen),
        _listed("not known", unused),
    ]
    if any(problems):
        raise file.error(
            f"tensors do not fit the architecture {config.architecture.name}: "
            + ", ".join(filter(None, problems)),
            "build the model from its Hugging Face checkpoint",
        )
    return sorted(origins, key=lambda origin: origin.offset)


def read_origin(weights: BinaryIO, origin: WeightOrigin, file: GgufFile) -> Iterator[Float32]:
    """The values of a tensor as float32, a few rows at a time, from first to last.

    Raises:
        DflashError: the file has become shorter than its header says.
    """
    columns = origin.source.columns
    rows = math.prod(origin.shape) // columns
    head = origin.turned_head
    if head is None or len(origin.shape) == 1:
        step = max(1, CHUNK_ELEMENTS // columns)
    else:  # whole heads
        step = head * max(1, CHUNK_ELEMENTS // (columns * head))
    row_bytes = origin.source.kind.row_bytes(columns)
    for first in range(0, rows, step):
        count = min(step, rows - first) * row_bytes
        data = os.pread(weights.fileno(), count, origin.offset + first * row_bytes)
        if len(data) < count:
            raise file.error(
                f"ends inside tensor {quoted(origin.source.name)}; it changed while it was read"
            )
        values = decode(data, origin.source.kind, columns)
        yield values if head is None else _turn_back(values, head, len(origin.shape) == 1)


def read_vector(file: GgufFile, name: str) -> Float32:
    """All values of a tensor of one dimension; DflashError for one of more, or too short a file."""
    source = file.tensors[name]
    if len(source.shape) != 1:
        raise file.error(f"tensor {quoted(name)} is {list(source.shape)}, not a vector")
    origin = WeightOrigin(name, source.shape, source, source.offset, None)
    with open_file(file.path, named=True) as weights:
        return np.concatenate([values.ravel() for values in read_origin(weights, origin, file)])


def _turn_back(values: Float32, head: int, is_vector: bool) -> Float32:
    """Rows [N, C] of whole heads, or all elements [1, N], in the order of Hugging Face.

    llama.cpp turns neighbours 2i and 2i + 1 of a head, Hugging Face i and i + D/2.
    """
    width = 1 if is_vector else values.shape[1]
    pairs = values.reshape(-1, head // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _listed(label: str, names: list[str]) -> str:
    shown = [quoted(name)[1:-1] for name in names]
    return f"{len(names)} {label} ({first_few(shown, _NAMES_SHOWN, '; ')})" if names else ""

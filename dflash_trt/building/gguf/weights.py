"""The weights of a GGUF file as safetensors: decoded in float32, rounded at most once.

Shapes: N rows, C columns, D head size.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dflash_trt.building.gguf.config import ROPE_FACTORS, TENSORS, ModelConfig
from dflash_trt.building.gguf.gguf_file import GgufFile, GgufTensor, decode
from dflash_trt.core.files import open_file
from dflash_trt.core.progress import Progress
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import first_few
from dflash_trt.models.families import target_rules
from dflash_trt.models.folder import SINGLE_NAME
from dflash_trt.models.name_map import size_of
from dflash_trt.models.weight_names import HARMLESS_SUFFIXES
from dflash_trt.quantization.codecs import Float32
from dflash_trt.quantization.tensor_rows import CHUNK_ELEMENTS, TensorLayout, open_shard

ImportedType = Literal["bf16", "fp32"]
MAX_SHARD_BYTES = 5_000_000_000

_CODES: Mapping[ImportedType, str] = {"bf16": "BF16", "fp32": "F32"}
_BELOW_BF16 = np.uint32(0xFFFF)
_TURNED = ("q_proj", "k_proj", "q_proj.bias", "k_proj.bias")


@dataclass(frozen=True, slots=True)
class WeightOrigin:
    """A tensor of the checkpoint and its source: the bytes from `offset` on.

    The rows of each of its heads are in llama.cpp's order where `turned_head` gives their size D.
    """

    layout: TensorLayout
    source: GgufTensor
    offset: int
    turned_head: int | None

    @property
    def length(self) -> int:
        """Bytes in the GGUF file."""
        return self.source.length * math.prod(self.layout.shape) // math.prod(self.source.shape)


@dataclass(slots=True)
class Stored:
    """What a file holds in one of GGUF's types; `rounded` values are others in bf16."""

    tensors: int = 0
    bytes: int = 0
    values: int = 0
    rounded: int = 0


def find_origins(
    file: GgufFile, config: ModelConfig, vocab: int, dtype: ImportedType
) -> list[WeightOrigin]:
    """Finds every tensor that a checkpoint of `config` has, in the order of the file's data.

    Raises:
        DflashError: tensors are missing, wrongly shaped, or would not be used.
    """
    rules = target_rules(
        config.architecture.family, attention_bias=config.attention_bias, tied=config.tied
    )
    layers, symbols = len(config.sizes.layers), {**config.symbols, "vocab": vocab}
    if layers > len(file.tensors):
        raise file.error(f"states {layers} layers and has {len(file.tensors)} tensors")
    origins: list[WeightOrigin] = []
    problems: dict[str, list[str]] = {"missing": [], "of another shape": [], "not known": []}
    for role, (name, terms) in rules.items():
        pattern, is_part = TENSORS[role].removesuffix("[{e}]"), TENSORS[role].endswith("[{e}]")
        shape = tuple(int(size_of(term, symbols)) for term in terms)
        parts = symbols["experts"] if is_part else 1
        stored = (parts, *shape) if is_part else shape
        turned = config.architecture.has_turned_heads and role.endswith(_TURNED)
        head = config.sizes.layer.head_dim if turned else None
        for i in range(layers if "{i}" in role else 1):
            source = file.tensors.get(pattern.format(i=i))
            if source is None:
                problems["missing"].append(pattern.format(i=i))
                continue
            if source.shape != stored:
                what = f"{source.name} is {list(source.shape)}, not {list(stored)}"
                problems["of another shape"].append(what)
                continue
            for e in range(parts):
                layout = TensorLayout(name.format(i=i, e=e), _CODES[dtype], shape)
                offset = source.offset + source.length // parts * e
                origins.append(WeightOrigin(layout, source, offset, head))
    if not any(problems.values()):  # else what is left is of no interest
        used = {origin.source.name for origin in origins} | {ROPE_FACTORS}
        left = [one for one in file.tensors if one not in used]
        problems["not known"] = [one for one in left if not one.endswith(HARMLESS_SUFFIXES)]
    told = [
        f"{len(names)} {label} ({first_few([quoted(one)[1:-1] for one in names], 4, '; ')})"
        for label, names in problems.items()
        if names
    ]
    if told:
        raise file.error(
            f"tensors do not fit the architecture {config.architecture.name}: {', '.join(told)}",
            "build the model from its Hugging Face checkpoint",
        )
    return sorted(origins, key=lambda origin: origin.offset)


def plan_shards(
    origins: Iterable[WeightOrigin], most: int = MAX_SHARD_BYTES
) -> dict[str, list[WeightOrigin]]:
    """Names files of at most `most` bytes, or of one tensor that is larger."""
    groups: list[list[WeightOrigin]] = [[]]
    size = 0
    for origin in origins:
        if groups[-1] and size + origin.layout.num_bytes > most:
            groups.append([])
            size = 0
        groups[-1].append(origin)
        size += origin.layout.num_bytes
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    count = f"{len(groups):05}"
    return {f"model-{i:05}-of-{count}.safetensors": group for i, group in enumerate(groups, 1)}


def write_shards(
    file: GgufFile, shards: Mapping[str, Sequence[WeightOrigin]], folder: Path, progress: Progress
) -> dict[str, Stored]:
    """Writes `shards` into `folder`, a few rows in memory at a time; returns counts by type.

    Raises:
        DflashError: values that are not finite, or a file that has become shorter.
    """
    stored: dict[str, Stored] = {}
    total = sum(origin.length for group in shards.values() for origin in group)
    progress.stage("writing weights", total)
    with open_file(file.path, named=True) as weights:
        for shard, group in shards.items():
            with open_shard(folder / shard, [origin.layout for origin in group]) as writer:
                for origin in group:
                    kind = stored.setdefault(origin.source.kind, Stored())
                    kind.tensors += 1
                    kind.bytes += origin.length
                    for values in _read(weights, origin, file):
                        piece, rounded = _convert(values, origin.layout.dtype)
                        if piece is None:
                            raise file.error(
                                f"tensor {quoted(origin.source.name)} holds NaN or infinities",
                                "the file is damaged, or its model cannot be used",
                            )
                        writer.write(origin.layout.name, piece)
                        kind.values += values.size
                        kind.rounded += rounded
                    progress.advance(origin.length)
    return stored


def read_vector(file: GgufFile, name: str) -> Float32:
    """Reads a tensor of one dimension; DflashError for one of more, or too short a file."""
    source = file.tensors[name]
    if len(source.shape) != 1:
        raise file.error(f"tensor {quoted(name)} is {list(source.shape)}, not a vector")
    origin = WeightOrigin(TensorLayout(name, "F32", source.shape), source, source.offset, None)
    with open_file(file.path, named=True) as weights:
        return np.concatenate([values.ravel() for values in _read(weights, origin, file)])


def _read(weights: BinaryIO, origin: WeightOrigin, file: GgufFile) -> Iterator[Float32]:
    """The values of a tensor as float32, a few rows at a time, from first to last."""
    source, head = origin.source, origin.turned_head
    is_vector, columns = len(source.shape) == 1, source.shape[-1]
    least = 1 if head is None or is_vector else head  # rows of whole heads
    step = least * max(1, CHUNK_ELEMENTS // (columns * least))
    rows = math.prod(origin.layout.shape) // columns
    for first in range(0, rows, step):
        count = min(step, rows - first) * source.row_bytes
        data = os.pread(weights.fileno(), count, origin.offset + first * source.row_bytes)
        if len(data) < count:
            what = f"ends inside tensor {quoted(source.name)}; it changed while it was read"
            raise file.error(what)
        values = decode(data, source)
        if head is not None:
            # llama.cpp turns neighbours 2i and 2i + 1 of a head, Hugging Face i and i + D/2.
            pairs = values.reshape(-1, head // 2, 2, 1 if is_vector else columns)
            values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
        yield values


def _convert(values: Float32, code: str) -> tuple[npt.NDArray[Any] | None, int]:
    """The values to write and how many of them changed; None for values that are not finite."""
    if code == "F32":
        return (values if np.isfinite(values).all() else None), 0
    rounded = int(np.count_nonzero(values.view(np.uint32) & _BELOW_BF16))
    piece = values.astype(ml_dtypes.bfloat16)  # ties to even; what is too large becomes infinite
    return (piece.view(np.uint16) if np.isfinite(piece).all() else None), rounded

"""Writes the weights of a GGUF file as safetensors: decoded in float32, rounded at most once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoints.folder import SINGLE_NAME
from dflash_trt.core.files import open_file
from dflash_trt.core.progress import Progress
from dflash_trt.core.strict_json import quoted
from dflash_trt.importing.header import GgufFile
from dflash_trt.importing.tensors import WeightOrigin, read_origin
from dflash_trt.quantization.codecs import Float32
from dflash_trt.quantization.tensors import TensorLayout, open_shard, shard_bytes

ImportedType = Literal["bf16", "fp32"]
MAX_SHARD_BYTES = 5_000_000_000

_CODES: Mapping[ImportedType, str] = {"bf16": "BF16", "fp32": "F32"}
_BELOW_BF16 = np.uint32(0xFFFF)


@dataclass(slots=True)
class Stored:
    """What a file holds in one of GGUF's types; `rounded` values are others in bf16."""

    tensors: int = 0
    bytes: int = 0
    values: int = 0
    rounded: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of the checkpoint: its tensors, and where each comes from."""

    name: str
    origins: Sequence[WeightOrigin]
    layout: Sequence[TensorLayout]

    @property
    def file_bytes(self) -> int:
        return shard_bytes(self.layout)


def plan_shards(
    origins: Iterable[WeightOrigin], dtype: ImportedType, most: int = MAX_SHARD_BYTES
) -> list[Shard]:
    """Files of at most `most` bytes, or of one tensor that is larger."""
    groups: list[list[tuple[WeightOrigin, TensorLayout]]] = [[]]
    size = 0
    for origin in origins:
        tensor = TensorLayout(origin.name, _CODES[dtype], origin.shape)
        if groups[-1] and size + tensor.num_bytes > most:
            groups.append([])
            size = 0
        groups[-1].append((origin, tensor))
        size += tensor.num_bytes
    count = len(groups)
    return [
        Shard(
            SINGLE_NAME if count == 1 else f"model-{number:05}-of-{count:05}.safetensors",
            [origin for origin, _ in group],
            [tensor for _, tensor in group],
        )
        for number, group in enumerate(groups, start=1)
    ]


def write_shards(
    file: GgufFile, shards: Sequence[Shard], folder: Path, progress: Progress
) -> dict[str, Stored]:
    """Writes `shards` into `folder`, a few rows in memory at a time; returns counts by type.

    Raises:
        DflashError: values that are not finite, or a file that has become shorter.
    """
    stored: dict[str, Stored] = {}
    total = sum(origin.length for shard in shards for origin in shard.origins)
    progress.stage("writing weights", total)
    with open_file(file.path, named=True) as weights:
        for shard in shards:
            with open_shard(folder / shard.name, shard.layout) as writer:
                for origin, tensor in zip(shard.origins, shard.layout, strict=True):
                    kind = stored.setdefault(origin.source.kind.name, Stored())
                    kind.tensors += 1
                    kind.bytes += origin.length
                    for values in read_origin(weights, origin, file):
                        piece, rounded = _convert(values, tensor.dtype)
                        if piece is None:
                            raise file.error(
                                f"tensor {quoted(origin.source.name)} holds NaN or infinities",
                                "the file is damaged, or its model cannot be used",
                            )
                        writer.write(tensor.name, piece)
                        kind.values += values.size
                        kind.rounded += rounded
                    progress.advance(origin.length)
    return stored


def _convert(values: Float32, code: str) -> tuple[npt.NDArray[Any] | None, int]:
    """The values to write and how many of them changed; None for values that are not finite."""
    if code == "F32":
        return (values if np.isfinite(values).all() else None), 0
    rounded = int(np.count_nonzero(values.view(np.uint32) & _BELOW_BF16))
    piece = values.astype(ml_dtypes.bfloat16)  # ties to even; what is too large becomes infinite
    return (piece.view(np.uint16) if np.isfinite(piece).all() else None), rounded

"""Turns a GGUF file into a Hugging Face checkpoint folder, which is whole or absent.

Weights are decoded in float32 and rounded at most once. Shapes: N rows, C columns, D head size.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from dflash_trt.building.gguf.config import (
    FROM_HF,
    ROPE_FACTORS,
    ModelConfig,
    add_rope_factors,
    make_config,
)
from dflash_trt.building.gguf.gguf_file import GgufFile, GgufTensor, gguf_package, read_gguf
from dflash_trt.building.gguf.tokenizer import Vocabulary, read_vocabulary, tokenizer_files
from dflash_trt.core.files import resolved
from dflash_trt.core.links import check_space
from dflash_trt.core.progress import Progress
from dflash_trt.core.publish import StagedKind, check_destination, staged_folder
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError, first_few
from dflash_trt.models.families import target_rules
from dflash_trt.models.folder import CONFIG_NAME, SINGLE_NAME
from dflash_trt.models.name_map import size_of
from dflash_trt.models.target import GENERATION_CONFIG_NAME, read_target
from dflash_trt.models.weight_names import HARMLESS_SUFFIXES
from dflash_trt.quantization.codecs import Float32
from dflash_trt.quantization.tensor_rows import (
    CHUNK_ELEMENTS,
    TensorLayout,
    open_shard,
    shard_bytes,
)
from dflash_trt.version import __version__

SOURCE_NAME = "gguf_source.json"
"""What a folder was imported from; only a folder that has it is overwritten."""
IMPORTED = StagedKind("checkpoint that was imported from GGUF", SOURCE_NAME)
ImportedType = Literal["bf16", "fp32"]
_CONFIG_TYPES: Mapping[ImportedType, str] = {"bf16": "bfloat16", "fp32": "float32"}
_CODES: Mapping[ImportedType, str] = {"bf16": "BF16", "fp32": "F32"}
_TURNED = ("q_proj", "k_proj", "q_proj.bias", "k_proj.bias")
"""Rows that lie in the order of llama.cpp's first RoPE, which turns neighbours: 0, D/2, 1 …"""


@dataclass(frozen=True, slots=True)
class WeightOrigin:
    """A tensor of the checkpoint and its source: the rows from `first` on.

    The rows of each of its heads are in llama.cpp's order where `turned_head` gives their size D.
    The source has `offset` added to every value.
    """

    layout: TensorLayout
    source: GgufTensor
    first: int = 0
    turned_head: int | None = None
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Imported:
    """What was written: `bytes` of weights, of `kinds` of tensors in the file.

    `rounded` of the `parameters` are others in bf16.
    """

    folder: Path
    file: GgufFile
    config: ModelConfig
    vocabulary: Vocabulary
    dtype: ImportedType
    bytes: int
    parameters: int
    kinds: Mapping[str, int]
    rounded: int

    def about(self, key: str) -> str | None:
        """What the file says of its model under general.`key`, such as "license"."""
        value = self.file.fields.get(f"general.{key}")
        return value if isinstance(value, str) else None


def import_gguf(
    path: str | Path,
    destination: Path,
    progress: Progress,
    *,
    dtype: ImportedType = "bf16",
    overwrite: bool = False,
) -> Imported:
    """Writes the model in the GGUF file `path` as a checkpoint that `build` takes.

    Blocks are decoded in float32. "bf16" rounds each value once, "fp32" keeps it. Memory stays
    at a few rows, whatever the size.

    Raises:
        DflashError: see `read_gguf`, `make_config` and `read_vocabulary`; tensors that are
            missing, wrongly shaped, of no use or not finite; a destination that exists or holds
            the file; a full disk.
    """
    path = Path(path)
    check_destination(resolved(destination), overwrite=overwrite, kind=IMPORTED)
    if resolved(destination) in resolved(path).parents:
        what = f"holds {path.name}, which would be gone with it"
        raise DflashError(what, where=destination, fix="choose another -o", usage=True)
    progress.stage("reading the header", None)
    file = read_gguf(path)
    config = make_config(file, _CONFIG_TYPES[dtype])
    vocabulary = read_vocabulary(file)
    size, ids = vocabulary.size, vocabulary.special_ids()
    config.values.update(vocab_size=size, **ids)
    origins = _find_origins(file, config, size, dtype)
    add_rope_factors(config, file)
    texts = tokenizer_files(file, vocabulary, config.values["max_position_embeddings"])
    texts[CONFIG_NAME] = _json(config.values)
    texts[GENERATION_CONFIG_NAME] = _json({key: one for key, one in ids.items() if one is not None})
    layouts = [one.layout for one in origins]
    kinds = Counter(one.source.kind for one in origins)
    with staged_folder(destination, overwrite=overwrite, kind=IMPORTED) as folder:
        check_space(shard_bytes(layouts), folder, destination)
        imported = Imported(
            destination,
            file,
            config,
            vocabulary,
            dtype,
            bytes=sum(layout.num_bytes for layout in layouts),
            parameters=sum(math.prod(layout.shape) for layout in layouts),
            kinds=dict(sorted(kinds.items())),
            rounded=_write_weights(file, origins, folder / SINGLE_NAME, progress),
        )
        texts[SOURCE_NAME] = _json(
            {
                "file": path.name,
                "bytes": file.size,
                **{key: imported.about(key) for key in ("name", "architecture", "license")},
                "dtype": dtype,
                "tensors": imported.kinds,
                "rounded_values": imported.rounded,
                "dflash_trt_version": __version__,
            }
        )
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        progress.stage("checking the checkpoint", None)
        try:
            read_target(folder)  # as `build` will
        except DflashError as error:  # which names a temporary folder
            raise file.error(f"makes no target: {error.what}", error.fix) from error
    return imported


def _find_origins(
    file: GgufFile, config: ModelConfig, vocab: int, dtype: ImportedType
) -> list[WeightOrigin]:
    """Every tensor that a checkpoint of `config` has, in the order of the file's data."""
    architecture, gguf = config.architecture, gguf_package()
    bias, tied = config.values["attention_bias"], config.values["tie_word_embeddings"]
    rules = target_rules(config.family, attention_bias=bias, tied=tied)
    layers, symbols = len(config.sizes.layers), {**config.symbols, "vocab": vocab}
    if layers > len(file.tensors):
        raise file.error(f"states {layers} layers and has {len(file.tensors)} tensors")
    kind = gguf.MODEL_ARCH[architecture.upper()]
    names = gguf.get_tensor_name_map(kind, layers)
    origins: list[WeightOrigin] = []
    problems: list[str] = []
    for role, (name, terms) in rules.items():
        shape = tuple(int(size_of(term, symbols)) for term in terms)
        parts = symbols["experts"] if "{e}" in name else 1  # a layer's lie in one tensor
        stored = (parts, *shape) if "{e}" in name else shape
        turned = architecture == "llama" and role.endswith(_TURNED)
        head = config.sizes.layer.head_dim if turned else None
        offset = config.family.norm_offset if role.endswith("norm") else 0.0
        for i in range(layers if "{i}" in role else 1):
            plain = name.replace(".{e}", "").format(i=i)
            theirs = str(names.get_name(plain, (".weight", ".bias")))
            source = file.tensors.get(theirs)
            if source is None:
                problems.append(f"{theirs} is missing")
            elif source.shape != stored:
                problems.append(f"{theirs} is {list(source.shape)}, not {list(stored)}")
            else:
                origins += (
                    WeightOrigin(
                        TensorLayout(name.format(i=i, e=e), _CODES[dtype], shape),
                        source,
                        len(source.rows) // parts * e,
                        head,
                        offset,
                    )
                    for e in range(parts)
                )
    used = {origin.source.name for origin in origins}
    if not config.family.is_gemma:
        used.add(ROPE_FACTORS)
    if not problems:  # else what is left is of no interest
        left = [one for one in file.tensors if one not in used]
        problems = [
            f"{quoted(one)[1:-1]} is not known"
            for one in left
            if not one.endswith(HARMLESS_SUFFIXES)
        ]
    if problems:
        what = f"tensors do not fit the architecture {architecture}"
        raise file.error(f"{what}: {first_few(problems, 4, '; ')}", FROM_HF)
    places = {name: place for place, name in enumerate(file.tensors)}  # in the order of their data
    return sorted(origins, key=lambda origin: (places[origin.source.name], origin.first))


def _write_weights(
    file: GgufFile, origins: Sequence[WeightOrigin], path: Path, progress: Progress
) -> int:
    """Writes all weights, a few rows in memory at a time; returns how many values are rounded."""
    rounded = 0
    progress.stage("writing weights", sum(origin.layout.num_bytes for origin in origins))
    with open_shard(path, [origin.layout for origin in origins]) as writer:
        for origin in origins:
            for values in _read(origin):
                piece: Any = values
                if origin.layout.dtype == "BF16":
                    rounded += int(np.count_nonzero(values.view(np.uint32) & 0xFFFF))
                    piece = values.astype(ml_dtypes.bfloat16)  # too large becomes infinite
                if not np.isfinite(piece).all():
                    what = f"tensor {quoted(origin.source.name)} holds NaN or infinities"
                    fix = "the file is damaged, or its model cannot be used"
                    raise file.error(what, fix)
                writer.write(origin.layout.name, piece.view(np.uint8))
            progress.advance(origin.layout.num_bytes)
    return rounded


def _read(origin: WeightOrigin) -> Iterator[Float32]:
    """The values of a tensor as float32, a few rows at a time, from first to last."""
    source, head = origin.source, origin.turned_head
    is_vector, columns = len(source.shape) == 1, source.shape[-1]
    least = 1 if head is None or is_vector else head  # rows of whole heads
    step = least * max(1, CHUNK_ELEMENTS // (columns * least))
    end = origin.first + math.prod(origin.layout.shape) // columns
    for first in range(origin.first, end, step):
        values = source.decode(first, min(first + step, end))
        if origin.offset:
            values = values - np.float32(origin.offset)
        if head is not None:
            # llama.cpp turns neighbours 2i and 2i + 1 of a head, Hugging Face i and i + D/2.
            pairs = values.reshape(-1, head // 2, 2, 1 if is_vector else columns)
            values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
        yield values


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"

"""Turns a GGUF file into a Hugging Face checkpoint folder, which is whole or absent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.folder import CONFIG_NAME, INDEX_NAME
from dflash_trt.checkpoints.target import GENERATION_CONFIG_NAME, read_target
from dflash_trt.core.files import resolved
from dflash_trt.core.links import check_space
from dflash_trt.core.progress import Progress
from dflash_trt.core.publish import StagedKind, check_destination, staged_folder
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError
from dflash_trt.importing.architectures import ROPE_FACTORS
from dflash_trt.importing.config import (
    ModelConfig,
    add_rope_factors,
    generation_config,
    make_config,
    refuse_other_files,
)
from dflash_trt.importing.header import GgufFile, read_gguf
from dflash_trt.importing.tensors import find_origins, read_vector
from dflash_trt.importing.tokenizer import special_ids, tokenizer_files
from dflash_trt.importing.vocabulary import Vocabulary, read_vocabulary
from dflash_trt.importing.weights import ImportedType, Shard, Stored, plan_shards, write_shards
from dflash_trt.version import __version__

SOURCE_NAME = "gguf_source.json"
"""What a folder was imported from; only a folder that has it is overwritten."""
IMPORTED = StagedKind("checkpoint that was imported from GGUF", SOURCE_NAME)
_CONFIG_TYPES: Mapping[ImportedType, str] = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class Imported:
    """What was written; `bytes` counts the weights, `stored` what they were, by GGUF's types."""

    folder: Path
    file: GgufFile
    config: ModelConfig
    vocabulary: Vocabulary
    dtype: ImportedType
    bytes: int
    shards: int
    stored: Mapping[str, Stored]

    @property
    def parameters(self) -> int:
        return sum(one.values for one in self.stored.values())

    def about(self, key: str) -> str | None:
        """What the file says of its model under general.`key`, such as "license"."""
        return _about(self.file, key)


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
        DflashError: see `read_gguf`, `make_config`, `read_vocabulary` and `find_origins`; weights
            that are not finite; a destination that exists or holds the file; a full disk.
    """
    path = Path(path)
    check_destination(resolved(destination), overwrite=overwrite, kind=IMPORTED)
    if resolved(destination) in resolved(path).parents:
        what = f"holds {path.name}, which would be gone with it"
        raise DflashError(what, where=destination, fix="choose another -o", usage=True)
    progress.stage("reading the header", None)
    file = read_gguf(path)
    config = make_config(file, refuse_other_files(file), _CONFIG_TYPES[dtype])
    vocabulary = read_vocabulary(file)
    _check_vocab_size(file, config, vocabulary.size)
    config.values.update(vocab_size=vocabulary.size, **special_ids(vocabulary))
    origins = find_origins(file, config, vocabulary.size)
    if ROPE_FACTORS in file.tensors:
        add_rope_factors(config, read_vector(file, ROPE_FACTORS), file)
    shards = plan_shards(origins, dtype)
    texts = tokenizer_files(file, vocabulary, config.values["max_position_embeddings"])
    texts |= _json_files(config, shards)
    with staged_folder(destination, overwrite=overwrite, kind=IMPORTED) as folder:
        check_space(sum(shard.file_bytes for shard in shards), folder, destination)
        stored = write_shards(file, shards, folder, progress)
        texts[SOURCE_NAME] = _json(_source(file, dtype, stored))
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        progress.stage("checking the checkpoint", None)
        _check(folder, path)
    return Imported(
        folder=destination,
        file=file,
        config=config,
        vocabulary=vocabulary,
        dtype=dtype,
        bytes=sum(tensor.num_bytes for shard in shards for tensor in shard.layout),
        shards=len(shards),
        stored=stored,
    )


def _check_vocab_size(file: GgufFile, config: ModelConfig, size: int) -> None:
    key = f"{config.architecture.name}.vocab_size"
    stated = file.single(key, size)
    if stated != size:
        what = f"{key} is {quoted(stated)}, and there are {size} tokens"
        raise file.error(what, "convert the model again")


def _json_files(config: ModelConfig, shards: Sequence[Shard]) -> dict[str, str]:
    files = {
        CONFIG_NAME: _json(config.values),
        GENERATION_CONFIG_NAME: _json(generation_config(config.values)),
    }
    if len(shards) > 1:
        total = sum(tensor.num_bytes for shard in shards for tensor in shard.layout)
        places = {tensor.name: shard.name for shard in shards for tensor in shard.layout}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        files[INDEX_NAME] = _json(index)
    return files


def _source(file: GgufFile, dtype: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    """Where the folder's weights come from, and what became of their values."""
    return {
        "file": file.path.name,
        "bytes": file.size,
        **{key: _about(file, key) for key in ("name", "architecture", "license")},
        "dtype": dtype,
        "tensors": {kind: one.tensors for kind, one in sorted(stored.items())},
        "rounded_values": sum(one.rounded for one in stored.values()),
        "dflash_trt_version": __version__,
    }


def _about(file: GgufFile, key: str) -> str | None:
    value = file.fields.get(f"general.{key}")
    return value if isinstance(value, str) else None


def _check(folder: Path, path: Path) -> None:
    """What `build` will read; an error, which names a temporary folder, is about the file."""
    try:
        read_target(folder)
    except DflashError as error:
        raise DflashError(f"makes no target: {error.what}", where=path, fix=error.fix) from error


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"

"""Turns a GGUF file into a Hugging Face checkpoint folder, which is whole or absent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.building.gguf.config import (
    ROPE_FACTORS,
    ModelConfig,
    add_rope_factors,
    find_architecture,
    make_config,
)
from dflash_trt.building.gguf.gguf_file import GgufFile, read_gguf
from dflash_trt.building.gguf.tokenizer import (
    Vocabulary,
    read_vocabulary,
    special_ids,
    tokenizer_files,
)
from dflash_trt.building.gguf.weights import (
    ImportedType,
    Stored,
    find_origins,
    plan_shards,
    read_vector,
    write_shards,
)
from dflash_trt.core.files import resolved
from dflash_trt.core.links import check_space
from dflash_trt.core.progress import Progress
from dflash_trt.core.publish import StagedKind, check_destination, staged_folder
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError
from dflash_trt.models.folder import CONFIG_NAME, INDEX_NAME
from dflash_trt.models.target import GENERATION_CONFIG_NAME, read_target
from dflash_trt.quantization.tensor_rows import TensorLayout, shard_bytes
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
    config = make_config(file, find_architecture(file), _CONFIG_TYPES[dtype])
    vocabulary = read_vocabulary(file)
    key, size = f"{config.architecture.name}.vocab_size", vocabulary.size
    if file.single(key, size) != size:
        what = f"{key} is {quoted(file.single(key))}, and there are {size} tokens"
        raise file.error(what, "convert the model again")
    config.values.update(vocab_size=size, **special_ids(vocabulary))
    origins = find_origins(file, config, size, dtype)
    if ROPE_FACTORS in file.tensors:
        add_rope_factors(config, read_vector(file, ROPE_FACTORS), file)
    shards = plan_shards(origins)
    layouts = {name: [one.layout for one in group] for name, group in shards.items()}
    texts = tokenizer_files(file, vocabulary, config.values["max_position_embeddings"])
    texts |= _json_files(config.values, layouts)
    with staged_folder(destination, overwrite=overwrite, kind=IMPORTED) as folder:
        check_space(sum(map(shard_bytes, layouts.values())), folder, destination)
        stored = write_shards(file, shards, folder, progress)
        imported = Imported(
            folder=destination,
            file=file,
            config=config,
            vocabulary=vocabulary,
            dtype=dtype,
            bytes=sum(origin.layout.num_bytes for origin in origins),
            shards=len(shards),
            stored=stored,
        )
        texts[SOURCE_NAME] = _json(_source(imported))
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        progress.stage("checking the checkpoint", None)
        try:
            read_target(folder)  # as `build` will
        except DflashError as error:  # which names a temporary folder
            raise file.error(f"makes no target: {error.what}", error.fix) from error
    return imported


def _json_files(
    config: Mapping[str, Any], layouts: Mapping[str, Sequence[TensorLayout]]
) -> dict[str, str]:
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    defaults = {key: config[key] for key in ids if config[key] is not None}
    files = {CONFIG_NAME: _json(config), GENERATION_CONFIG_NAME: _json(defaults)}
    if len(layouts) > 1:
        places = {one.name: shard for shard, group in layouts.items() for one in group}
        total = sum(one.num_bytes for group in layouts.values() for one in group)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        files[INDEX_NAME] = _json(index)
    return files


def _source(imported: Imported) -> dict[str, Any]:
    """Where the folder's weights come from, and what became of their values."""
    stored = imported.stored
    return {
        "file": imported.file.path.name,
        "bytes": imported.file.size,
        **{key: imported.about(key) for key in ("name", "architecture", "license")},
        "dtype": imported.dtype,
        "tensors": {kind: one.tensors for kind, one in sorted(stored.items())},
        "rounded_values": sum(one.rounded for one in stored.values()),
        "dflash_trt_version": __version__,
    }


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"

"""A checkpoint rewritten shard by shard: bounded in memory, resumable, whole or absent.

Its configs are those of ModelOpt's unified Hugging Face layout, as its 0.47 writes them.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.core.files import FileKind, copy_small, resolved
from dflash_trt.core.formats import NVFP4_BLOCK, Format
from dflash_trt.core.links import check_space
from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError
from dflash_trt.models.folder import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, Checkpoint
from dflash_trt.models.quantization import CONFIG_KEY, QUANT_CONFIG_NAME, WEIGHTS_ONLY
from dflash_trt.models.safetensors_header import TensorEntry, header_sha256
from dflash_trt.quantization.partial import PartialCheckpoint, TensorReport, partial_checkpoint
from dflash_trt.quantization.tensor_rows import ShardWriter, TensorLayout, open_shard, shard_bytes
from dflash_trt.version import __version__

PRODUCER = {"name": "dflash-trt", "version": __version__}


def quantization_config(algorithm: str, kept: Sequence[str]) -> dict[str, Any]:
    """config.json's `quantization_config`, by which loaders know a quantised checkpoint."""
    element: dict[str, Any] = {"dynamic": False, "type": "float"}
    if algorithm == Format.FP8.algorithm:
        element["num_bits"] = 8
    else:
        element |= {"num_bits": 4, "group_size": NVFP4_BLOCK}
    group: dict[str, Any] = {"weights": element, "targets": ["Linear"]}
    if algorithm != WEIGHTS_ONLY:
        group = {"input_activations": element, **group}
    return {
        "config_groups": {"group_0": group},
        "ignore": list(kept),
        "quant_algo": algorithm,
        "producer": PRODUCER,
        "quant_method": "modelopt",
    }


# Tokenizer, generation defaults, chat template, licence: neither weights nor code.
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_COPIED_PREFIXES = ("LICENSE", "NOTICE")
_WRITTEN_NAMES = (CONFIG_NAME, INDEX_NAME, QUANT_CONFIG_NAME)
_COPY_CHUNK = 8 << 20


class Rewriting(ABC):
    """What becomes of a checkpoint's tensors; those that it does not name are copied.

    `stage` is what its progress is called. `key` is JSON that is equal for two runs which must
    write the same of one source. The copy states `algorithm`, ModelOpt's `quant_algo` (None: it
    is in floating point), the modules `kept` as they were, and the source's `kv_cache` format.
    """

    def __init__(
        self,
        stage: str,
        key: Mapping[str, Any],
        kept: tuple[str, ...],
        algorithm: str | None,
        kv_cache: str | None = None,
    ) -> None:
        self.stage, self.key, self.kept = stage, key, kept
        self.algorithm, self.kv_cache = algorithm, kv_cache

    @abstractmethod
    def layout(self, entry: TensorEntry) -> list[TensorLayout] | None:
        """What is written in place of a tensor: None copies it, an empty list drops it."""

    @abstractmethod
    def prepare(self, partial: PartialCheckpoint, progress: Progress) -> None:
        """Finds the scales; what they come from is kept in `partial` for a run that continues."""

    @abstractmethod
    def write(
        self, entry: TensorEntry, shard: ShardWriter, on_bytes: Callable[[int], None]
    ) -> tuple[str, TensorReport] | None:
        """Writes the layout of a tensor; the module that it belongs to, and how it went. None for
        one that was not converted."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What was written.

    `source_bytes` and `bytes` count tensors before and after; `reports` are of the converted
    modules, `kept` the others (or patterns of them); `resumed_shards` were finished by an
    interrupted run.
    """

    folder: Path
    algorithm: str | None
    source_bytes: int
    bytes: int
    reports: dict[str, TensorReport]
    kept: tuple[str, ...]
    shards: int
    resumed_shards: int

    @property
    def errors(self) -> dict[str, float]:
        """Relative Frobenius error of each converted module."""
        return {module: report.error for module, report in self.reports.items()}


@dataclass(frozen=True, slots=True)
class _Shard:
    """A file of the source and what becomes of its tensors."""

    name: str
    entries: tuple[TensorEntry, ...]
    layout: tuple[TensorLayout, ...]


def rewrite_checkpoint(
    checkpoint: Checkpoint,
    rewriting: Rewriting,
    destination: Path,
    progress: Progress,
    *,
    overwrite: bool = False,
) -> Rewritten:
    """Writes `checkpoint` again with `rewriting` applied to its tensors.

    Shards keep their names. `destination` is whole or absent; the next run with the same source
    and `rewriting.key` continues an interrupted one after its last finished shard.

    Raises:
        DflashError: see `partial_checkpoint`; a destination that overlaps the source; a disk
            that is too small; whatever `rewriting` refuses.
    """
    old, new = resolved(checkpoint.path), resolved(destination)
    if old == new or old in new.parents or new in old.parents:
        what = f"overlaps the checkpoint {checkpoint.path}"
        raise DflashError(what, where=destination, fix="choose another -o", usage=True)
    shards = _plan_shards(checkpoint, rewriting)
    copied = _files_to_copy(checkpoint.path)
    parts = {"version": __version__, "source": checkpoint_key(checkpoint), **rewriting.key}
    with partial_checkpoint(destination, _digest(parts), overwrite=overwrite) as partial:
        finished = {shard.name for shard in shards if partial.is_finished(shard.name)}
        if partial.origin == "continued":
            done = f"{len(finished)} of {len(shards)} shards are finished"
            progress.stage(f"continuing: {done}", None)
        elif partial.origin == "restarted":
            progress.stage("starting over: the checkpoint or the options have changed", None)
        pending = [shard for shard in shards if shard.name not in finished]
        for shard in pending:  # a half-written one is written again from its start
            (partial.folder / shard.name).unlink(missing_ok=True)
        check_space(_needed_bytes(pending, copied), partial.folder, destination)
        rewriting.prepare(partial, progress)
        progress.stage(rewriting.stage, _source_bytes(pending))
        for shard in pending:
            reports: dict[str, TensorReport] = {}
            with open_shard(partial.folder / shard.name, shard.layout) as writer:
                for entry in shard.entries:
                    layout = rewriting.layout(entry)
                    if layout is None:
                        copy_tensor(entry, writer, progress.advance)
                    elif layout:
                        written = rewriting.write(entry, writer, progress.advance)
                        reports |= {} if written is None else dict([written])
                    else:
                        progress.advance(entry.length)
            partial.finish(shard.name, reports)
        _write_descriptions(checkpoint, rewriting, shards, partial.folder)
        for file in copied:
            copy_small(file, partial.folder / file.name, FileKind.TOKENIZER)  # the largest
        reports = {
            module: report
            for shard in shards
            for module, report in partial.state.shards[shard.name].reports.items()
        }
    return Rewritten(
        folder=destination,
        algorithm=rewriting.algorithm,
        source_bytes=_source_bytes(shards),
        bytes=sum(tensor.num_bytes for shard in shards for tensor in shard.layout),
        reports=reports,
        kept=rewriting.kept,
        shards=len(shards),
        resumed_shards=len(finished),
    )


def rewritten_bytes(checkpoint: Checkpoint, rewriting: Rewriting) -> int:
    """The size of the folder that `rewrite_checkpoint` makes, short of its configs."""
    return _needed_bytes(_plan_shards(checkpoint, rewriting), _files_to_copy(checkpoint.path))


def checkpoint_key(checkpoint: Checkpoint) -> str:
    """Equal for two readings of a folder that has not changed, as far as headers and times tell."""
    shards = []
    for file in checkpoint.files:
        status = file.stat()
        # The time tells weights apart that were saved again under the same header.
        shards.append([file.name, status.st_size, status.st_mtime_ns, header_sha256(file)])
    parts = {"path": str(resolved(checkpoint.path)), "config": checkpoint.config, "shards": shards}
    return _digest(parts)


def _digest(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _plan_shards(checkpoint: Checkpoint, rewriting: Rewriting) -> list[_Shard]:
    by_file: dict[Path, list[TensorEntry]] = {}
    for entry in checkpoint.tensors.values():
        by_file.setdefault(entry.file, []).append(entry)
    shards = []
    for file in checkpoint.files:
        entries = sorted(by_file.get(resolved(file), []), key=lambda entry: entry.offset)
        layout: list[TensorLayout] = []
        for entry in entries:
            replaced = rewriting.layout(entry)
            same = [TensorLayout(entry.name, entry.dtype, entry.shape)]
            layout += same if replaced is None else replaced
        shards.append(_Shard(file.name, tuple(entries), tuple(layout)))
    return shards


def _files_to_copy(folder: Path) -> list[Path]:
    files = [one for one in folder.iterdir() if not one.is_dir() and one.name not in _WRITTEN_NAMES]
    return sorted(
        one
        for one in files
        if one.suffix in _COPIED_SUFFIXES or one.name.startswith(_COPIED_PREFIXES)
    )


def _source_bytes(shards: list[_Shard]) -> int:
    return sum(entry.length for shard in shards for entry in shard.entries)


def _needed_bytes(shards: list[_Shard], copied: list[Path]) -> int:
    size = sum(shard_bytes(shard.layout) for shard in shards)
    return size + sum(path.stat().st_size for path in copied)


def copy_tensor(entry: TensorEntry, shard: ShardWriter, on_bytes: Callable[[int], None]) -> None:
    """Writes a tensor as it is."""
    for data in entry.pieces(_COPY_CHUNK):
        shard.write(entry.name, data)
        on_bytes(len(data))


def _write_descriptions(
    checkpoint: Checkpoint, rewriting: Rewriting, shards: list[_Shard], folder: Path
) -> None:
    config = {key: value for key, value in checkpoint.config.items() if key != CONFIG_KEY}
    algorithm, kept = rewriting.algorithm, rewriting.kept
    if algorithm is not None:
        config[CONFIG_KEY] = quantization_config(algorithm, kept)
        stated: dict[str, Any] = {"quant_algo": algorithm}
        stated["kv_cache_quant_algo"] = rewriting.kv_cache
        if algorithm != Format.FP8.algorithm:
            stated["group_size"] = NVFP4_BLOCK
        stated["exclude_modules"] = list(kept)
        older = {"producer": PRODUCER, "quantization": stated}  # which older loaders read
        _write_json(folder / QUANT_CONFIG_NAME, older)
    _write_json(folder / CONFIG_NAME, config)
    if [shard.name for shard in shards] != [SINGLE_NAME]:
        total = sum(tensor.num_bytes for shard in shards for tensor in shard.layout)
        names = {tensor.name: shard.name for shard in shards for tensor in shard.layout}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        _write_json(folder / INDEX_NAME, index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

"""A checkpoint rewritten shard by shard: bounded in memory, resumable, whole or absent."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dflash_trt.checkpoints.folder import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, Checkpoint
from dflash_trt.checkpoints.quantization import CONFIG_KEY
from dflash_trt.checkpoints.safetensors_header import TensorEntry, header_sha256
from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError
from dflash_trt.quantization.convert import copy_tensor
from dflash_trt.quantization.layout import QUANT_CONFIG_NAME
from dflash_trt.quantization.partial import (
    Origin,
    PartialCheckpoint,
    TensorReport,
    partial_checkpoint,
)
from dflash_trt.quantization.shards import ShardWriter, TensorLayout, shard_bytes
from dflash_trt.version import __version__

# Tokenizer, generation defaults, chat template: whatever describes and is neither weight nor code.
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_COPIED_PREFIXES = ("LICENSE", "NOTICE")
_WRITTEN_NAMES = (CONFIG_NAME, INDEX_NAME, QUANT_CONFIG_NAME)


@dataclass(frozen=True, slots=True)
class Description:
    """What a checkpoint states of its precision; None for one in floating point.

    `quantization_config` is config.json's, `hf_quant_config` the file of that name.
    """

    quantization_config: dict[str, Any] | None
    hf_quant_config: dict[str, Any] | None


class Rewriting(Protocol):
    """What becomes of a checkpoint's tensors; those that it does not name are copied."""

    @property
    def stage(self) -> str:
        """What its progress is called."""

    @property
    def key(self) -> Mapping[str, Any]:
        """JSON that is equal for two runs which must write the same of one source."""

    def layout(self, entry: TensorEntry) -> list[TensorLayout] | None:
        """What is written in place of a tensor: None copies it, an empty list drops it."""

    def prepare(self, partial: PartialCheckpoint, progress: Progress) -> None:
        """Finds the scales; what they come from is kept in `partial` for a run that continues."""

    def write(
        self, entry: TensorEntry, shard: ShardWriter, on_bytes: Callable[[int], None]
    ) -> tuple[str, TensorReport]:
        """Writes the layout of a tensor; the module that it belongs to, and how it went."""

    def describe(self) -> Description:
        """What the new checkpoint states of its precision."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What was written.

    `source_bytes` and `bytes` count tensors before and after; `reports` are of the converted
    modules; `resumed_shards` were finished by an interrupted run.
    """

    folder: Path
    source_bytes: int
    bytes: int
    reports: dict[str, TensorReport]
    shards: int
    resumed_shards: int


@dataclass(frozen=True, slots=True)
class _Shard:
    """A file of the source and what becomes of its tensors."""

    name: str
    entries: tuple[TensorEntry, ...]
    layout: tuple[TensorLayout, ...]

    @property
    def source_bytes(self) -> int:
        return sum(entry.length for entry in self.entries)


def rewrite_checkpoint(
    checkpoint: Checkpoint,
    rewriting: Rewriting,
    destination: Path,
    progress: Progress,
    *,
    overwrite: bool = False,
) -> Rewritten:
    """Writes `checkpoint` again with `rewriting` applied to its tensors.

    Shards keep their names. `destination` is whole or absent; an interrupted run is continued by
    the next one with the same source and `rewriting.key`, after its last finished shard.

    Raises:
        DflashError: see `partial_checkpoint`; a destination that overlaps the source; a disk
            that is too small; whatever `rewriting` refuses.
    """
    _check_apart(checkpoint.path, destination)
    shards = _plan_shards(checkpoint, rewriting)
    copied = _files_to_copy(checkpoint.path)
    key = _key(checkpoint, rewriting)
    with partial_checkpoint(destination, key, overwrite=overwrite) as partial:
        finished = {shard.name for shard in shards if partial.is_finished(shard.name)}
        _announce(partial, len(finished), len(shards), progress)
        pending = [shard for shard in shards if shard.name not in finished]
        _check_space(pending, copied, partial.folder, destination)
        rewriting.prepare(partial, progress)
        progress.stage(rewriting.stage, sum(shard.source_bytes for shard in pending))
        for shard in pending:
            _write_shard(shard, rewriting, partial, progress)
        _write_descriptions(checkpoint, rewriting, shards, partial.folder)
        for file in copied:
            shutil.copyfile(file, partial.folder / file.name)
        reports = {
            module: report
            for shard in shards
            for module, report in partial.state.shards[shard.name].reports.items()
        }
    return Rewritten(
        folder=destination,
        source_bytes=sum(shard.source_bytes for shard in shards),
        bytes=sum(tensor.num_bytes for shard in shards for tensor in shard.layout),
        reports=reports,
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
    parts = {"path": str(checkpoint.path.resolve()), "config": checkpoint.config, "shards": shards}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _check_apart(source: Path, destination: Path) -> None:
    """Refuses to write into, over or around the source."""
    old, new = source.resolve(), destination.resolve()
    if old == new or old in new.parents or new in old.parents:
        raise DflashError(
            f"overlaps the checkpoint {source}",
            where=destination,
            fix="choose another -o",
            usage=True,
        )


def _plan_shards(checkpoint: Checkpoint, rewriting: Rewriting) -> list[_Shard]:
    by_file: dict[Path, list[TensorEntry]] = {}
    for entry in checkpoint.tensors.values():
        by_file.setdefault(entry.file, []).append(entry)
    shards = []
    for file in checkpoint.files:
        entries = sorted(by_file.get(file.resolve(), []), key=lambda entry: entry.offset)
        layout: list[TensorLayout] = []
        for entry in entries:
            replaced = rewriting.layout(entry)
            same = [TensorLayout(entry.name, entry.dtype, entry.shape)]
            layout += same if replaced is None else replaced
        shards.append(_Shard(file.name, tuple(entries), tuple(layout)))
    return shards


def _files_to_copy(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and path.name not in _WRITTEN_NAMES
        and (path.suffix in _COPIED_SUFFIXES or path.name.startswith(_COPIED_PREFIXES))
    )


def _key(checkpoint: Checkpoint, rewriting: Rewriting) -> str:
    """Equal for two runs that must write the same."""
    parts = {"version": __version__, "source": checkpoint_key(checkpoint), **rewriting.key}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _announce(partial: PartialCheckpoint, finished: int, count: int, progress: Progress) -> None:
    if partial.origin is Origin.CONTINUED:
        progress.stage(f"continuing: {finished} of {count} shards are finished", None)
    elif partial.origin is Origin.RESTARTED:
        progress.stage("starting over: the checkpoint or the options have changed", None)


def _check_space(pending: list[_Shard], copied: list[Path], folder: Path, shown: Path) -> None:
    size = _needed_bytes(pending, copied)
    # A shard that was half-written is written again from its start.
    torn = [folder / shard.name for shard in pending]
    free = shutil.disk_usage(folder).free
    free += sum(path.stat().st_size for path in torn if path.exists())
    if size > free:
        raise DflashError(
            f"needs {size:,} bytes, {free:,} are free", where=shown, fix="free some space"
        )


def _needed_bytes(shards: list[_Shard], copied: list[Path]) -> int:
    size = sum(shard_bytes(shard.layout) for shard in shards)
    return size + sum(path.stat().st_size for path in copied)


def _write_shard(
    shard: _Shard, rewriting: Rewriting, partial: PartialCheckpoint, progress: Progress
) -> None:
    reports: dict[str, TensorReport] = {}
    with ShardWriter(partial.folder / shard.name, shard.layout) as writer:
        for entry in shard.entries:
            layout = rewriting.layout(entry)
            if layout is None:
                copy_tensor(entry, writer, progress.advance)
            elif layout:
                module, report = rewriting.write(entry, writer, progress.advance)
                reports[module] = report
            else:
                progress.advance(entry.length)
    partial.finish(shard.name, reports)


def _write_descriptions(
    checkpoint: Checkpoint, rewriting: Rewriting, shards: list[_Shard], folder: Path
) -> None:
    described = rewriting.describe()
    config = {key: value for key, value in checkpoint.config.items() if key != CONFIG_KEY}
    if described.quantization_config is not None:
        config[CONFIG_KEY] = described.quantization_config
    _write_json(folder / CONFIG_NAME, config)
    if described.hf_quant_config is not None:
        _write_json(folder / QUANT_CONFIG_NAME, described.hf_quant_config)
    if [shard.name for shard in shards] != [SINGLE_NAME]:
        total = sum(tensor.num_bytes for shard in shards for tensor in shard.layout)
        names = {tensor.name: shard.name for shard in shards for tensor in shard.layout}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        _write_json(folder / INDEX_NAME, index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

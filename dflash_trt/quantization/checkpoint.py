"""Writes a quantised copy of a checkpoint folder in ModelOpt's unified Hugging Face layout."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt import __version__
from dflash_trt.checkpoints.draft import DraftSpec
from dflash_trt.checkpoints.folder import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, Checkpoint
from dflash_trt.checkpoints.safetensors_header import TensorEntry, header_sha256
from dflash_trt.checkpoints.target import TargetSpec
from dflash_trt.errors import DflashError
from dflash_trt.progress import Progress
from dflash_trt.quantization.convert import copy_tensor, linear_layout, write_linear
from dflash_trt.quantization.layout import QUANT_CONFIG_NAME, hf_quant_config, quantization_config
from dflash_trt.quantization.linears import (
    Algorithm,
    Linear,
    QuantizeOptions,
    Selection,
    select_linears,
)
from dflash_trt.quantization.partial import Origin, PartialCheckpoint, partial_checkpoint
from dflash_trt.quantization.rows import largest_magnitude
from dflash_trt.quantization.scales import Activations, Scales, compute_scales
from dflash_trt.quantization.shards import ShardWriter, TensorLayout, shard_bytes

# Tokenizer, generation defaults, chat template: whatever describes and is neither weight nor code.
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_COPIED_PREFIXES = ("LICENSE", "NOTICE")
_WRITTEN_NAMES = (CONFIG_NAME, INDEX_NAME, QUANT_CONFIG_NAME)


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """What was written.

    `source_bytes` and `bytes` count tensors before and after; `errors` is each linear's relative
    Frobenius error by module, `kept` the linears and embeddings that stayed as they were;
    `resumed_shards` were finished by an interrupted run.
    """

    folder: Path
    algorithm: Algorithm
    source_bytes: int
    bytes: int
    errors: dict[str, float]
    kept: tuple[str, ...]
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


def quantize_checkpoint(
    spec: TargetSpec | DraftSpec,
    options: QuantizeOptions,
    activations: Activations,
    destination: Path,
    progress: Progress,
) -> QuantizedCheckpoint:
    """Quantises the linears of a model; everything else is copied byte for byte.

    Shards keep their names and their tensors. Memory stays at a few chunks of rows, whatever
    the size. `destination` is whole or absent; an interrupted run is continued by the next one
    with the same source, options and `activations.key`, after its last finished shard.

    Raises:
        DflashError: see `select_linears`, `compute_scales` and `partial_checkpoint`; weights
            that are not finite; a disk that is too small.
    """
    selection = select_linears(spec, options)
    _check_apart(spec.checkpoint.path, destination)
    linears = {linear.weight.name: linear for linear in selection.linears}
    shards = _plan_shards(spec, linears, options.algorithm)
    copied = _files_to_copy(spec.checkpoint.path)
    key = _key(spec, options, selection, activations)
    with partial_checkpoint(destination, key, overwrite=options.overwrite) as partial:
        finished = {shard.name for shard in shards if partial.is_finished(shard.name)}
        _announce(partial, len(finished), len(shards), progress)
        pending = [shard for shard in shards if shard.name not in finished]
        _check_space(pending, copied, partial.folder, destination)
        scales = _find_scales(selection, options.algorithm, activations, partial, progress)
        progress.stage(
            f"quantizing to {options.algorithm}", sum(shard.source_bytes for shard in pending)
        )
        for shard in pending:
            _write_shard(shard, linears, options.algorithm, scales, partial, progress)
        _write_descriptions(spec, options.algorithm, selection, shards, partial.folder)
        for file in copied:
            shutil.copyfile(file, partial.folder / file.name)
        errors = {
            module: error
            for shard in shards
            for module, error in partial.state.shards[shard.name].errors.items()
        }
    return QuantizedCheckpoint(
        folder=destination,
        algorithm=options.algorithm,
        source_bytes=sum(shard.source_bytes for shard in shards),
        bytes=sum(tensor.num_bytes for shard in shards for tensor in shard.layout),
        errors=errors,
        kept=selection.kept,
        shards=len(shards),
        resumed_shards=len(finished),
    )


def planned_bytes(spec: TargetSpec | DraftSpec, options: QuantizeOptions) -> int:
    """The size of the folder that `quantize_checkpoint` makes, short of its configs.

    Raises:
        DflashError: see `select_linears`.
    """
    linears = {one.weight.name: one for one in select_linears(spec, options).linears}
    shards = _plan_shards(spec, linears, options.algorithm)
    return _needed_bytes(shards, _files_to_copy(spec.checkpoint.path))


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


def _plan_shards(
    spec: TargetSpec | DraftSpec, linears: dict[str, Linear], algorithm: Algorithm
) -> list[_Shard]:
    by_file: dict[Path, list[TensorEntry]] = {}
    for entry in spec.checkpoint.tensors.values():
        by_file.setdefault(entry.file, []).append(entry)
    shards = []
    for file in spec.checkpoint.files:
        entries = sorted(by_file.get(file.resolve(), []), key=lambda entry: entry.offset)
        layout: list[TensorLayout] = []
        for entry in entries:
            linear = linears.get(entry.name)
            if linear is None:
                layout.append(TensorLayout(entry.name, entry.dtype, entry.shape))
            else:
                layout += linear_layout(linear, algorithm)
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


def _key(
    spec: TargetSpec | DraftSpec,
    options: QuantizeOptions,
    selection: Selection,
    activations: Activations,
) -> str:
    """Equal for two runs that must write the same."""
    parts = {
        "version": __version__,
        "source": checkpoint_key(spec.checkpoint),
        "algorithm": options.algorithm,
        "linears": [linear.module for linear in selection.linears],
        "activations": activations.key,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def checkpoint_key(checkpoint: Checkpoint) -> str:
    """Equal for two readings of a folder that has not changed, as far as headers and times tell."""
    shards = []
    for file in checkpoint.files:
        status = file.stat()
        # The time tells weights apart that were saved again under the same header.
        shards.append([file.name, status.st_size, status.st_mtime_ns, header_sha256(file)])
    parts = {"path": str(checkpoint.path.resolve()), "config": checkpoint.config, "shards": shards}
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


def _find_scales(
    selection: Selection,
    algorithm: Algorithm,
    activations: Activations,
    partial: PartialCheckpoint,
    progress: Progress,
) -> dict[str, Scales]:
    """Scales of every linear; what they come from is kept for a run that has to continue."""
    if partial.state.weights is None:
        progress.stage("reading weights", sum(linear.weight.length for linear in selection.linears))
        partial.state.weights = {
            linear.role: largest_magnitude(linear.weight, progress.advance)
            for linear in selection.linears
        }
        partial.save()
    if partial.state.activations is None:
        partial.state.activations = dict(activations.observe(partial.workspace))
        partial.save()
    return compute_scales(
        selection.linears, algorithm, partial.state.weights, partial.state.activations
    )


def _write_shard(
    shard: _Shard,
    linears: dict[str, Linear],
    algorithm: Algorithm,
    scales: dict[str, Scales],
    partial: PartialCheckpoint,
    progress: Progress,
) -> None:
    errors: dict[str, float] = {}
    with ShardWriter(partial.folder / shard.name, shard.layout) as writer:
        for entry in shard.entries:
            linear = linears.get(entry.name)
            if linear is None:
                copy_tensor(entry, writer, progress.advance)
            else:
                errors[linear.module] = write_linear(
                    linear, algorithm, scales[linear.role], writer, progress.advance
                )
    partial.finish(shard.name, errors)


def _write_descriptions(
    spec: TargetSpec | DraftSpec,
    algorithm: Algorithm,
    selection: Selection,
    shards: list[_Shard],
    folder: Path,
) -> None:
    config = spec.checkpoint.config | {
        "quantization_config": quantization_config(algorithm, selection)
    }
    _write_json(folder / CONFIG_NAME, config)
    _write_json(folder / QUANT_CONFIG_NAME, hf_quant_config(algorithm, selection))
    if [shard.name for shard in shards] != [SINGLE_NAME]:
        total = sum(tensor.num_bytes for shard in shards for tensor in shard.layout)
        names = {tensor.name: shard.name for shard in shards for tensor in shard.layout}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        _write_json(folder / INDEX_NAME, index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

"""Writes a quantised copy of a checkpoint folder in ModelOpt's unified Hugging Face layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.decoder import DecoderSpec
from dflash_trt.checkpoints.safetensors_header import TensorEntry
from dflash_trt.core.progress import Progress
from dflash_trt.quantization.convert import linear_layout, write_linear
from dflash_trt.quantization.kv_scales import KV_CACHE, KvScales
from dflash_trt.quantization.linears import QuantizeOptions, select_linears
from dflash_trt.quantization.partial import PartialCheckpoint, TensorReport
from dflash_trt.quantization.rewrite import (
    Rewriting,
    Rewritten,
    copy_tensor,
    rewrite_checkpoint,
    rewritten_bytes,
)
from dflash_trt.quantization.rows import largest_magnitude
from dflash_trt.quantization.scales import Activations, Scales, compute_scales
from dflash_trt.quantization.shards import ShardWriter, TensorLayout


class _LinearRewriting(Rewriting):
    """Linears in floating point become FP8 or NVFP4."""

    def __init__(
        self, spec: DecoderSpec, options: QuantizeOptions, activations: Activations | None = None
    ) -> None:
        selection = select_linears(spec, options)
        key: dict[str, Any] = {
            "algorithm": options.algorithm,
            "linears": [linear.module for linear in selection.linears],
            "activations": activations.key if activations else None,
        }
        kv_cache = None if spec.quantization is None else spec.quantization.kv_cache_algorithm
        if options.kv_scales:
            key["kv_scales"], kv_cache = True, KV_CACHE
        stage = f"quantizing to {options.algorithm}"
        super().__init__(stage, key, selection.kept, options.algorithm, kv_cache)
        self._algorithm = options.algorithm
        self._activations = activations
        self._linears = {linear.weight.name: linear for linear in selection.linears}
        self._scales: dict[str, Scales] = {}
        self._kv_scales = KvScales(spec) if options.kv_scales else None

    def layout(self, entry: TensorEntry) -> list[TensorLayout] | None:
        linear, scale = self._linears.get(entry.name), None
        if self._kv_scales is not None:
            if self._kv_scales.is_stale(entry.name):
                return []
            scale = self._kv_scales.name(entry.name)
        if linear is None and scale is None:
            return None
        same = [TensorLayout(entry.name, entry.dtype, entry.shape)]
        written = same if linear is None else linear_layout(linear, self._algorithm)
        return written if scale is None else [*written, TensorLayout(scale, "F32", ())]

    def prepare(self, partial: PartialCheckpoint, progress: Progress) -> None:
        linears = self._linears.values()
        if partial.state.weights is None:
            progress.stage("reading weights", sum(linear.weight.length for linear in linears))
            partial.state.weights = {
                linear.role: largest_magnitude(linear.weight, progress.advance)
                for linear in linears
            }
            partial.save()
        if partial.state.activations is None:
            assert self._activations is not None
            partial.state.activations = dict(self._activations.observe(partial.workspace))
            partial.save()
        self._scales = compute_scales(
            linears, self._algorithm, partial.state.weights, partial.state.activations
        )
        if self._kv_scales is not None:
            self._kv_scales.prepare(partial.state.activations)

    def write(
        self, entry: TensorEntry, shard: ShardWriter, on_bytes: Callable[[int], None]
    ) -> tuple[str, TensorReport] | None:
        scales = self._kv_scales
        if scales is not None and (name := scales.name(entry.name)) is not None:
            shard.write(name, scales.encode(entry.name))
        linear = self._linears.get(entry.name)
        if linear is None:  # a projection that stays as it is, beside its cache's scale
            copy_tensor(entry, shard, on_bytes)
            return None
        error = write_linear(linear, self._algorithm, self._scales[linear.role], shard, on_bytes)
        return linear.module, TensorReport(error=error)


def quantize_checkpoint(
    spec: DecoderSpec,
    options: QuantizeOptions,
    activations: Activations,
    destination: Path,
    progress: Progress,
) -> Rewritten:
    """Quantises the linears of a model; everything else is copied byte for byte.

    Memory stays at a few chunks of rows, whatever the size. An interrupted run is continued by
    the next one with the same source, options and `activations.key`.

    Raises:
        DflashError: see `select_linears`, `compute_scales` and `rewrite_checkpoint`; weights
            that are not finite.
    """
    rewriting = _LinearRewriting(spec, options, activations)
    return rewrite_checkpoint(
        spec.checkpoint, rewriting, destination, progress, overwrite=options.overwrite
    )


def planned_bytes(spec: DecoderSpec, options: QuantizeOptions) -> int:
    """The size of the folder that `quantize_checkpoint` makes, short of its configs.

    Raises:
        DflashError: see `select_linears`.
    """
    return rewritten_bytes(spec.checkpoint, _LinearRewriting(spec, options))

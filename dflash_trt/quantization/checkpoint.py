"""Writes a quantised copy of a checkpoint folder in ModelOpt's unified Hugging Face layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.decoder import DecoderSpec
from dflash_trt.checkpoints.safetensors_header import TensorEntry
from dflash_trt.core.progress import Progress
from dflash_trt.quantization.convert import linear_layout, write_linear
from dflash_trt.quantization.layout import hf_quant_config, quantization_config
from dflash_trt.quantization.linears import (
    Algorithm,
    QuantizeOptions,
    select_linears,
)
from dflash_trt.quantization.partial import PartialCheckpoint, TensorReport
from dflash_trt.quantization.rewrite import (
    Description,
    checkpoint_key,
    rewrite_checkpoint,
    rewritten_bytes,
)
from dflash_trt.quantization.rows import largest_magnitude
from dflash_trt.quantization.scales import Activations, Scales, compute_scales
from dflash_trt.quantization.shards import ShardWriter, TensorLayout

__all__ = ["QuantizedCheckpoint", "checkpoint_key", "planned_bytes", "quantize_checkpoint"]


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


class _LinearRewriting:
    """Linears in floating point become FP8 or NVFP4."""

    def __init__(
        self,
        spec: DecoderSpec,
        options: QuantizeOptions,
        activations: Activations | None = None,
    ) -> None:
        self._selection = select_linears(spec, options)
        self._algorithm = options.algorithm
        stated = spec.quantization
        self._kv_cache = None if stated is None else stated.kv_cache_algorithm
        self._activations = activations
        self._linears = {linear.weight.name: linear for linear in self._selection.linears}
        self._scales: dict[str, Scales] = {}

    @property
    def kept(self) -> tuple[str, ...]:
        """Modules that stay as they are."""
        return self._selection.kept

    @property
    def stage(self) -> str:
        return f"quantizing to {self._algorithm}"

    @property
    def key(self) -> Mapping[str, Any]:
        return {
            "algorithm": self._algorithm,
            "linears": [linear.module for linear in self._selection.linears],
            "activations": self._activations.key if self._activations else None,
        }

    def layout(self, entry: TensorEntry) -> list[TensorLayout] | None:
        linear = self._linears.get(entry.name)
        return None if linear is None else linear_layout(linear, self._algorithm)

    def prepare(self, partial: PartialCheckpoint, progress: Progress) -> None:
        linears = self._selection.linears
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

    def write(
        self, entry: TensorEntry, shard: ShardWriter, on_bytes: Callable[[int], None]
    ) -> tuple[str, TensorReport]:
        linear = self._linears[entry.name]
        scales = self._scales[linear.role]
        error = write_linear(linear, self._algorithm, scales, shard, on_bytes)
        return linear.module, TensorReport(error=error)

    def describe(self) -> Description:
        algorithm, kept = self._algorithm.value, self.kept
        return Description(
            quantization_config(algorithm, kept), hf_quant_config(algorithm, kept, self._kv_cache)
        )


def quantize_checkpoint(
    spec: DecoderSpec,
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
        DflashError: see `select_linears`, `compute_scales` and `rewrite_checkpoint`; weights
            that are not finite.
    """
    rewriting = _LinearRewriting(spec, options, activations)
    written = rewrite_checkpoint(
        spec.checkpoint, rewriting, destination, progress, overwrite=options.overwrite
    )
    return QuantizedCheckpoint(
        folder=destination,
        algorithm=options.algorithm,
        source_bytes=written.source_bytes,
        bytes=written.bytes,
        errors={module: report.error for module, report in written.reports.items()},
        kept=rewriting.kept,
        shards=written.shards,
        resumed_shards=written.resumed_shards,
    )


def planned_bytes(spec: DecoderSpec, options: QuantizeOptions) -> int:
    """The size of the folder that `quantize_checkpoint` makes, short of its configs.

    Raises:
        DflashError: see `select_linears`.
    """
    rewriting = _LinearRewriting(spec, options)
    return rewritten_bytes(spec.checkpoint, rewriting)

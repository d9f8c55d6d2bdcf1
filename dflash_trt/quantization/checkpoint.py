"""Writes a quantised copy of a checkpoint folder in ModelOpt's unified Hugging Face layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt.core.formats import NVFP4_BLOCK, Format
from dflash_trt.core.progress import Progress
from dflash_trt.models.decoder import DecoderSpec
from dflash_trt.models.quantized_weights import is_kv_scale
from dflash_trt.models.safetensors_header import ITEM_BYTES, TensorEntry
from dflash_trt.quantization.codecs import (
    dequantize_fp8,
    dequantize_nvfp4,
    quantize_fp8,
    quantize_nvfp4,
)
from dflash_trt.quantization.linears import Linear, QuantizeOptions, select_linears
from dflash_trt.quantization.partial import PartialCheckpoint, TensorReport
from dflash_trt.quantization.rewrite import (
    Rewriting,
    Rewritten,
    copy_tensor,
    rewrite_checkpoint,
    rewritten_bytes,
)
from dflash_trt.quantization.scales import KV_CACHE, Activations, KvScales, Scales, compute_scales
from dflash_trt.quantization.tensor_rows import (
    ShardWriter,
    TensorLayout,
    iterate_rows,
    largest_magnitude,
    sum_of_squares,
)


def linear_layout(linear: Linear, form: Format) -> list[TensorLayout]:
    """What is written in place of a linear's weight."""
    rows, columns = linear.weight.shape
    name, module = linear.weight.name, linear.module
    scalars = [f"{module}.input_scale"]
    if form is Format.FP8:
        tensors = [TensorLayout(name, "F8_E4M3", (rows, columns))]
        scalars.append(f"{module}.weight_scale")
    else:
        tensors = [
            TensorLayout(name, "U8", (rows, columns // 2)),
            TensorLayout(f"{module}.weight_scale", "F8_E4M3", (rows, columns // NVFP4_BLOCK)),
        ]
        scalars.append(f"{module}.weight_scale_2")
    return tensors + [TensorLayout(scalar, "F32", ()) for scalar in scalars]


class _LinearRewriting(Rewriting):
    def __init__(
        self, spec: DecoderSpec, options: QuantizeOptions, activations: Activations | None = None
    ) -> None:
        selection = select_linears(spec, options)
        key: dict[str, Any] = {
            "algorithm": options.form.algorithm,
            "linears": [linear.module for linear in selection.linears],
            "activations": activations.key if activations else None,
        }
        kv_cache = None if spec.quantization is None else spec.quantization.kv_cache_algorithm
        if options.kv_scales:
            key["kv_scales"], kv_cache = True, KV_CACHE
        stage = f"quantizing to {options.form.algorithm}"
        super().__init__(stage, key, selection.kept, options.form.algorithm, kv_cache)
        self._form = options.form
        self._activations = activations
        self._linears = {linear.weight.name: linear for linear in selection.linears}
        self._scales: dict[str, Scales] = {}
        self._kv_scales = KvScales(spec) if options.kv_scales else None

    def layout(self, entry: TensorEntry) -> list[TensorLayout] | None:
        linear, scale = self._linears.get(entry.name), None
        if self._kv_scales is not None:
            if is_kv_scale(entry.name):  # which the new ones replace
                return []
            scale = self._kv_scales.names.get(entry.name)
        if linear is None and scale is None:
            return None
        same = [TensorLayout(entry.name, entry.dtype, entry.shape)]
        written = same if linear is None else linear_layout(linear, self._form)
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
            linears, self._form, partial.state.weights, partial.state.activations
        )
        if self._kv_scales is not None:
            self._kv_scales.prepare(partial.state.activations)

    def write(
        self, entry: TensorEntry, shard: ShardWriter, on_bytes: Callable[[int], None]
    ) -> tuple[str, TensorReport] | None:
        caches = self._kv_scales
        if caches is not None and (scale := caches.names.get(entry.name)) is not None:
            shard.write(scale, caches.encode(entry.name))
        linear = self._linears.get(entry.name)
        if linear is None:  # a projection that stays as it is, beside its cache's scale
            copy_tensor(entry, shard, on_bytes)
            return None
        module, scales, is_fp8 = linear.module, self._scales[linear.role], self._form is Format.FP8
        error = norm = 0.0
        for rows in iterate_rows(entry):
            if is_fp8:
                codes = quantize_fp8(rows, scales.weight)
                decoded = dequantize_fp8(codes, scales.weight)
            else:
                codes, blocks = quantize_nvfp4(rows, scales.weight)
                decoded = dequantize_nvfp4(codes, blocks, scales.weight)
                shard.write(f"{module}.weight_scale", blocks)
            shard.write(entry.name, codes)
            decoded -= rows
            error += sum_of_squares(decoded)
            norm += sum_of_squares(rows)
            on_bytes(rows.size * ITEM_BYTES[entry.dtype])
        per_tensor = "weight_scale" if is_fp8 else "weight_scale_2"
        shard.write(f"{module}.{per_tensor}", np.asarray(scales.weight, "<f4").tobytes())
        shard.write(f"{module}.input_scale", np.asarray(scales.input, "<f4").tobytes())
        return module, TensorReport(error=math.sqrt(error / norm) if norm else 0.0)


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

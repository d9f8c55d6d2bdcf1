"""How graphs write rows into KV caches, whoever attends to them then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dflash_trt.graph.bindings import KV, cache_output, page_table_input
from dflash_trt.graph.block_attention import block_attention_function
from dflash_trt.graph.form import CacheDtype, GraphForm, Precision
from dflash_trt.graph.kv_cache_update import kv_cache_update_function
from dflash_trt.graph.model_builder import LayerBuilder
from dflash_trt.models.quantized_weights import read_kv_scales


def store_rows(layer: LayerBuilder, k: str, v: str, *, is_exact: bool = False) -> list[str]:
    """Writes rows by whatever operation the form has for it; returns the caches after.

    Linear caches of the compute type take a standard operation. `is_exact` rows are not rounded to
    what E4M3 holds, whatever the form.
    """
    b, form = layer.b, layer.b.form
    if is_exact:
        form = replace(form, cache_dtype=CacheDtype.COMPUTE)
    if form.is_paged or form.is_fp8:
        operands, outputs = cache_values(layer, form)
        operands = [k, v, layer.rows.positions, *operands]
        function = kv_cache_update_function(form)
        return b.call(function, operands, "cache_update", outputs=outputs, **paging(layer))
    updated = []
    for kind, cache, value in zip(KV, layer.caches, (k, v), strict=True):
        name, operands = f"{kind}_cache_update", [cache, value, layer.rows.start]
        updated.append(b.node("TensorScatter", operands, name, output=cache_output(cache), axis=2))
    return updated


def cache_values(layer: LayerBuilder, form: GraphForm | None = None) -> tuple[list[str], list[str]]:
    """Operands of an operation that writes K and V, from the page table on, and its outputs.

    The operation is that of the graph's form, or of `form`.
    """
    form = form or layer.b.form
    operands = [page_table(layer)] * form.is_paged + layer.caches
    if form.is_fp8:
        operands.append(kv_scales(layer))
    return operands, [cache_output(cache) for cache in layer.caches]


def kv_scales(layer: LayerBuilder) -> str:
    """float32 [2]: the scales of the layer's K and V."""
    spec = layer.spec
    scales = read_kv_scales(spec.checkpoint.tensors, spec.weights, spec.quantization, layer.index)
    name = f"{layer.owner}_kv_scales_{layer.index}"
    return layer.b.constant(name, [2], scales, Precision.FLOAT32)


def page_table(layer: LayerBuilder) -> str:
    """The page table of a layer's pages."""
    layers = layer.spec.sizes.layers
    # Behind the layers of an EAGLE-3 head are its features, of every position.
    window = layers[layer.index].window if layer.index < len(layers) else None
    return page_table_input(window if window in layer.b.form.windows else None)


def paging(layer: LayerBuilder) -> dict[str, Any]:
    """The attribute of an operation that finds rows by the page table."""
    page_size = layer.b.form.page_size
    return {} if page_size is None else {"page_size": page_size}


def attend_by_kernel(layer: LayerBuilder, q: str, caches: Sequence[str]) -> str:
    """Attention of q [B,heads,S,D], pre-scaled, over caches that hold the call's rows."""
    b, form, sizes = layer.b, layer.b.form, layer.sizes
    operands = [q, *caches, layer.rows.lengths]
    if form.is_paged:
        operands.append(page_table(layer))
    if form.is_fp8:
        operands.append(kv_scales(layer))
    if sizes.has_sinks:
        operands.append(layer.weight("sinks", Precision.FLOAT32))
    else:
        none = [-math.inf] * sizes.heads
        name = f"no_sinks_{sizes.heads}"
        operands.append(b.constant(name, [sizes.heads], none, Precision.FLOAT32))
    function, window = block_attention_function(form), sizes.window or 0
    causal = int(sizes.is_causal)
    return b.call(function, operands, "attend", is_causal=causal, window=window)[0]

"""CacheStrategy: how graphs of a form write and read KV caches, and what several do alike."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dflash_trt.graph.bindings import KV, Dim, cache_output, page_table_input
from dflash_trt.graph.block_attention import block_attention_function
from dflash_trt.graph.form import CacheDtype, GraphForm, Precision
from dflash_trt.graph.kv_cache_update import kv_cache_update_function
from dflash_trt.graph.model_builder import LayerBuilder
from dflash_trt.models.quantized_weights import read_kv_scales


@dataclass(frozen=True, slots=True)
class CacheStrategy(ABC):
    """How graphs of `form` hold a layer's K and V.

    `sink_dims` is what a cache's head size grows by where the model has attention sinks.
    """

    form: GraphForm
    sink_dims: ClassVar[int] = 0

    def shape(self, kv_heads: int, head_dim: int, window: int | None = None) -> tuple[Dim, ...]:
        """A cache as an input or output of a graph, with letters for the axes left open.

        [B, kv heads, M, D], or a pool [pages, page_size, kv heads, D] with nobody's page in it.
        Layers of another `window` have other pages.
        """
        form = self.form
        if form.page_size is None:
            return ("B", kv_heads, form.cache_length or "M", head_dim)
        pages: Dim = "pages" if window is None else f"pages_{window}"
        if (fixed := form.pages_of(window)) is not None:
            pages = fixed + 1
        return (pages, form.page_size, kv_heads, head_dim)

    @abstractmethod
    def attend(self, layer: LayerBuilder, q: str, k: str, v: str) -> str:
        """Writes k, v [B,kv heads,S,D] at the call's rows; returns attention of q [B,heads,S,D].

        All have norm and RoPE behind them, and q is scaled by 1/sqrt(D). Rows are read through
        the cache, so that one kernel sees context and block alike.
        """

    def linear_view(self, layer: LayerBuilder) -> tuple[str, str]:
        """K and V before the call, [B,kv heads,M,D], for a draft that attends to them itself."""
        k, v = layer.caches
        return k, v

    def chain_rows(self, layer: LayerBuilder, k: str, v: str) -> tuple[str, str]:
        """K and V [B,kv heads,S,D] of a chain's rows as they are cached."""
        return k, v


@dataclass(frozen=True, slots=True)
class KernelStrategy(CacheStrategy):
    """Caches that only kernels of ours use on TensorRT: paged, FP8 or both; sinks as they are."""

    def attend(self, layer: LayerBuilder, q: str, k: str, v: str) -> str:
        return attend_by_kernel(layer, q, write_rows(layer, k, v))


def store_rows(layer: LayerBuilder, k: str, v: str, *, is_exact: bool = False) -> list[str]:
    """Writes rows by whatever operation the form has for it; returns the caches after.

    `is_exact` rows are not rounded to what E4M3 holds, whatever the form.
    """
    form = layer.b.form
    if is_exact:
        form = replace(form, cache_dtype=CacheDtype.COMPUTE)
    if form.is_paged or form.is_fp8:
        return write_rows(layer, k, v, form)
    return scatter_rows(layer, k, v)


def write_rows(layer: LayerBuilder, k: str, v: str, form: GraphForm | None = None) -> list[str]:
    """Writes rows in one operation, `kv_cache_update`; returns the caches after.

    They are held as in the graph's own form, or as `form` says.
    """
    operands, outputs = cache_values(layer, form)
    return layer.b.call(
        kv_cache_update_function(form or layer.b.form),
        [k, v, layer.rows.positions, *operands],
        "cache_update",
        outputs=outputs,
        **paging(layer),
    )


def scatter_rows(layer: LayerBuilder, k: str, v: str) -> list[str]:
    """Writes rows to linear caches of the compute type, which a standard operation does."""
    return [
        layer.b.node(
            "TensorScatter",
            [cache, value, layer.rows.start],
            f"{kind}_cache_update",
            output=cache_output(cache),
            axis=2,
        )
        for kind, cache, value in zip(KV, layer.caches, (k, v), strict=True)
    ]


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

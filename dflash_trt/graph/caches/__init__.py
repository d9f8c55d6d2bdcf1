"""How graphs hold, write and read KV caches: what each form does is chosen here alone."""

from __future__ import annotations

from dflash_trt.graph.bindings import Dim
from dflash_trt.graph.caches.cpu import attend_on_cpu
from dflash_trt.graph.caches.native import SINK_DIMS, attend_natively, sink_rows
from dflash_trt.graph.caches.rows import attend_by_kernel, store_rows
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.model_builder import LayerBuilder


def attend(layer: LayerBuilder, q: str, k: str, v: str) -> str:
    """Writes k, v [B,kv heads,S,D] at the call's rows; returns attention of q [B,heads,S,D].

    All have norm and RoPE behind them, and q is scaled by 1/sqrt(D). Rows are read through the
    cache, so that one kernel sees context and block alike. Caches that are paged or FP8 only
    kernels of ours use on TensorRT.
    """
    form = layer.b.form
    if form.has_kernel_caches:
        return attend_by_kernel(layer, q, store_rows(layer, k, v))
    return (attend_natively if form.is_native else attend_on_cpu)(layer, q, k, v)


def store_chain(layer: LayerBuilder, k: str, v: str) -> None:
    """Writes K and V [B,kv heads,S,D] of a chain's rows."""
    if _has_sink_dims(layer.b.form):
        k, v = sink_rows(layer, k, v)
    store_rows(layer, k, v)


def cache_shape(
    form: GraphForm, kv_heads: int, head_dim: int, window: int | None
) -> tuple[Dim, ...]:
    """A cache as an input or output of a graph, with letters for the axes left open.

    [B, kv heads, M, D], or a pool [pages, page_size, kv heads, D] with nobody's page in it.
    Layers of another `window` have other pages.
    """
    if form.page_size is None:
        return ("B", kv_heads, form.cache_length or "M", head_dim)
    pages: Dim = "pages" if window is None else f"pages_{window}"
    if (fixed := form.pages_of(window)) is not None:
        pages = fixed + 1
    return (pages, form.page_size, kv_heads, head_dim)


def cache_head_dim(head_dim: int, has_sinks: bool, form: GraphForm) -> int:
    """The head size of a cache: larger than the model's where it has room for a sink."""
    return head_dim + SINK_DIMS * stores_sinks(has_sinks, form)


def stores_sinks(has_sinks: bool, form: GraphForm) -> bool:
    """Whether the caches of a model that `has_sinks` have room for them."""
    return has_sinks and _has_sink_dims(form)


def _has_sink_dims(form: GraphForm) -> bool:
    return form.is_native and not form.has_kernel_caches

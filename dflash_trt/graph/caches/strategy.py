"""CacheStrategy: what a form of KV caches has to say, and what several say alike."""

from __future__ import annotations

from typing import Any, Protocol

from dflash_trt.checkpoints.kv_scales import read_kv_scales
from dflash_trt.graph.bindings import KV, PAGE_TABLE, Dim, cache_output
from dflash_trt.graph.form import Precision
from dflash_trt.graph.kv_cache_update import kv_cache_update_function
from dflash_trt.graph.model_builder import LayerBuilder


class CacheStrategy(Protocol):
    """How graphs of one form hold a layer's K and V."""

    @property
    def sink_dims(self) -> int:
        """What a cache's head size grows by where the model has attention sinks."""
        ...

    def shape(self, kv_heads: int, head_dim: int) -> tuple[Dim, ...]:
        """A cache as an input or output of a graph, with letters for the axes left open."""
        ...

    def attend(self, layer: LayerBuilder, q: str, k: str, v: str) -> str:
        """Writes k, v [B,kv heads,S,D] at the call's rows; returns attention of q [B,heads,S,D].

        Norm and RoPE are behind them, and q is scaled by 1/sqrt(D). Rows are attended to through
        the cache, so that one kernel sees context and block alike.
        """
        ...


def write_rows(layer: LayerBuilder, k: str, v: str) -> list[str]:
    """Writes rows in one operation, `kv_cache_update`; returns the caches after."""
    operands, outputs = cache_values(layer)
    return layer.b.call(
        kv_cache_update_function(layer.b.form),
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


def cache_values(layer: LayerBuilder) -> tuple[list[str], list[str]]:
    """Operands of an operation that writes K and V, from the page table on, and its outputs."""
    form = layer.b.form
    operands = [PAGE_TABLE] * form.is_paged + layer.caches
    if form.is_fp8:
        operands.append(kv_scales(layer))
    return operands, [cache_output(cache) for cache in layer.caches]


def kv_scales(layer: LayerBuilder) -> str:
    """float32 [2]: the scales of the layer's K and V."""
    spec = layer.spec
    scales = read_kv_scales(spec.checkpoint.tensors, spec.weights, spec.quantization, layer.index)
    name = f"{layer.owner}_kv_scales_{layer.index}"
    return layer.b.constant(name, [2], scales, Precision.FLOAT32)


def paging(layer: LayerBuilder) -> dict[str, Any]:
    """The attribute of an operation that finds rows by the page table."""
    page_size = layer.b.form.page_size
    return {} if page_size is None else {"page_size": page_size}

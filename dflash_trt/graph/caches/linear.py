"""Linear caches for the CPU, and attention that ONNX Runtime computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx

from dflash_trt.graph.caches.sink_attention import sink_attention_function
from dflash_trt.graph.caches.strategy import CacheStrategy, scatter_rows, write_rows
from dflash_trt.graph.functions import AttentionOverload, attention_function
from dflash_trt.graph.model_builder import LayerBuilder

AttentionCall = tuple[onnx.FunctionProto, list[str], dict[str, Any]]
"""A function, its operands and its attributes."""


@dataclass(frozen=True, slots=True)
class LinearStrategy(CacheStrategy):
    """ONNX Runtime's own attention, over numbers or what E4M3 makes of them."""

    def attend(self, layer: LayerBuilder, q: str, k: str, v: str) -> str:
        write = write_rows if self.form.is_fp8 else scatter_rows
        caches = write(layer, k, v)
        function, operands, attributes = cpu_attention(layer, q, caches, linear_length(layer))
        return layer.b.call(function, operands, "attend", **attributes)[0]


def linear_length(layer: LayerBuilder) -> Callable[[], str]:
    """What adds the value M [1] of a layer's caches."""
    return lambda: layer.b.node("Shape", layer.caches[:1], "cache_length", start=2, end=3)


def cpu_attention(
    layer: LayerBuilder, q: str, caches: list[str], measure: Callable[[], str]
) -> AttentionCall:
    """Attention over linear caches whose length `measure` adds, with sinks where there are."""
    sizes = layer.sizes
    if not sizes.has_sinks:
        return plain_attention(layer, q, caches, measure)
    mask = layer.rows.window_mask(sizes.window, sizes.is_causal, measure)
    operands = [q, *caches, mask, layer.weight("sinks")]
    return sink_attention_function(sizes.head_dim), operands, {}


def plain_attention(
    layer: LayerBuilder, q: str, caches: list[str], measure: Callable[[], str]
) -> AttentionCall:
    """Attention without sinks, as `cpu_attention` has it."""
    sizes, rows = layer.sizes, layer.rows
    kind: AttentionOverload = "lower_right" if sizes.is_causal else "none"
    overload, mask = kind, ""
    if sizes.window is not None:
        overload, kind = "masked", "none"
        mask = rows.window_mask(sizes.window, sizes.is_causal, measure)
    operands = [q, *caches, mask, "", rows.lengths]
    return attention_function(overload), operands, {"causal_kind": kind}

"""Linear caches for TensorRT's own attention, with a place for attention sinks.

A sink is a logit s_h in a head's softmax that no value belongs to. TensorRT's kernels know of none,
so it is one more key with value 0: one more dimension of queries holds s_h, where the sink's key
has 1 and all others 0, which is exact. It stands behind each call's rows until the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dflash_trt.graph.caches.linear import linear_length, plain_attention
from dflash_trt.graph.caches.strategy import CacheStrategy, scatter_rows
from dflash_trt.graph.functions import attention_facts, attention_function
from dflash_trt.graph.model_builder import LayerBuilder

# TensorRT's kernels take head sizes that are multiples of 8.
SINK_DIMS = 8


@dataclass(frozen=True, slots=True)
class NativeStrategy(CacheStrategy):
    """TensorRT's own attention, which is told nothing of sinks."""

    sink_dims: ClassVar[int] = SINK_DIMS

    def attend(self, layer: LayerBuilder, q: str, k: str, v: str) -> str:
        sizes = layer.sizes
        if sizes.has_sinks:
            return _attend_with_sinks(layer, q, k, v)
        caches = scatter_rows(layer, k, v)
        function, operands, attributes = plain_attention(layer, q, caches, linear_length(layer))
        facts = attention_facts(
            sizes.heads, sizes.head_dim, causal=sizes.is_causal, window=sizes.window
        )
        return layer.b.call(function, operands, "attend", facts=facts, **attributes)[0]


def _attend_with_sinks(layer: LayerBuilder, q: str, k: str, v: str) -> str:
    b, sizes, rows = layer.b, layer.sizes, layer.rows
    q = _widen_queries(layer, q)
    k, v = _append_sink(layer, k, "k"), _append_sink(layer, v, "v")
    caches = scatter_rows(layer, k, v)
    mask = rows.window_mask(sizes.window, sizes.is_causal, linear_length(layer), with_sink=True)
    operands = [q, *caches, mask, "", rows.sink_lengths()]
    function = attention_function("masked")
    (attended,) = b.call(function, operands, "attend", causal_kind="none")
    cut = [b.integers(value) for value in (0, sizes.head_dim, 3)]
    return b.node("Slice", [attended, *cut], "without_sink")


def _widen_queries(layer: LayerBuilder, q: str) -> str:
    """q [B,H,S,D] with `SINK_DIMS` more dimensions, the first of which holds the sinks."""
    b = layer.b
    by_head = b.node("Reshape", [layer.weight("sinks"), b.integers(1, -1, 1, 1)], "sink_heads")
    padding = b.integers(0, 0, 0, 0, 0, 0, 0, SINK_DIMS - 1)
    by_head = b.node("Pad", [by_head, padding], "sink_dimensions")
    heads = b.node("Shape", [q], "query_heads", start=0, end=3)
    shape = b.node("Concat", [heads, b.integers(SINK_DIMS)], "sink_shape", axis=0)
    columns = b.node("Expand", [by_head, shape], "sink_columns")
    return b.node("Concat", [q, columns], "q_with_sink", axis=3)


def _append_sink(layer: LayerBuilder, rows: str, kv: str) -> str:
    """K or V rows [B,H,S,D] with `SINK_DIMS` more dimensions and the sink as one more row."""
    b, head_dim = layer.b, layer.sizes.head_dim
    padding = b.integers(0, 0, 0, 0, 0, 0, 0, SINK_DIMS)
    wide = b.node("Pad", [rows, padding], f"{kv}_wide")
    row = [0.0] * (head_dim + SINK_DIMS)
    row[head_dim] = float(kv == "k")
    stored = b.constant(f"sink.{kv}.{head_dim}", [1, 1, 1, len(row)], row)
    sizes = [layer.rows.batch, b.integers(layer.sizes.kv_heads, 1, len(row))]
    shape = b.node("Concat", sizes, f"{kv}_sink_shape", axis=0)
    sink = b.node("Expand", [stored, shape], f"{kv}_sink")
    return b.node("Concat", [wide, sink], f"{kv}_with_sink", axis=2)

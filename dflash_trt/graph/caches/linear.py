"""Linear caches for the CPU, and attention that ONNX Runtime computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper

from dflash_trt.graph.caches.strategy import CacheStrategy, scatter_rows, write_rows
from dflash_trt.graph.functions import AttentionOverload, attention_function, define
from dflash_trt.graph.model_builder import LayerBuilder

# Behind the cache, a sink's place depends on the cache's length only. ONNX Runtime sums rows in one
# order for all lengths that are multiples of 64 (backends/onnxruntime/caches.py).
_PADDING = 64

# A sink is one more key (see native.py). A row is put in front as in functions.py.
_SINK_ATTENTION = """
sink_attention (q, k, v, mask, sinks) => (attended)
{{
    front = Constant <value_ints = [0, 0, 1, 0, 0, 0, 0, 0]> ()
    rows = Pad <mode = "edge"> (q, front)
    mask_rows = Pad <mode = "edge"> (mask, front)
    by_head = Constant <value_ints = [1, -1, 1, 1]> ()
    one = Constant <value_ints = [1]> ()
    heads = Shape <start = 0, end = 3> (rows)
    column_shape = Concat <axis = 0> (heads, one)
    sink_heads = Reshape (sinks, by_head)
    sink_column = Expand (sink_heads, column_shape)
    queries = Concat <axis = 3> (rows, sink_column)

    dimension = Constant <value_ints = [0, 0, 0, 0, 0, 0, 0, 1]> ()
    positions = Constant <value_ints = [0, 0, 0, 0, 0, 0, {padding}, 0]> ()
    k_wide = Pad (k, dimension)
    values = Pad (v, positions)
    ones = Constant <value_ints = [1, 1]> ()
    kv_heads = Shape <start = 0, end = 2> (k)
    keys_shape = Concat <axis = 0> (kv_heads, ones)
    sink_keys = Expand (sink_key, keys_shape)
    keys = Concat <axis = 2> (k_wide, sink_keys)

    batch = Shape <start = 0, end = 3> (mask_rows)
    seen_shape = Concat <axis = 0> (batch, one)
    seen = Expand (sink_seen, seen_shape)
    key_mask = Concat <axis = 3> (mask_rows, seen)
    padded = Attention <scale = 1.0, is_causal = 0> (queries, keys, values, key_mask)
    end = Constant <value_ints = [2147483647]> ()
    row_axis = Constant <value_ints = [2]> ()
    attended = Slice (padded, one, end, row_axis)
}}
"""

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


def sink_attention_function(head_dim: int) -> onnx.FunctionProto:
    """`dflash::sink_attention`: attention over a padded KV cache, with sinks.

    q [B,H_q,S,D] pre-scaled by 1/sqrt(D); k, v [B,H_kv,M,D]; mask bool [B,1,S,M]; sinks [H_q].
    """
    key = [0.0] * (_PADDING * (head_dim + 1))
    key[head_dim] = 1.0
    seen = [1] + [0] * (_PADDING - 1)
    key_shape, seen_shape = [1, 1, _PADDING, head_dim + 1], [1, 1, 1, _PADDING]
    constants = {
        "sink_key": helper.make_tensor("", TensorProto.FLOAT, key_shape, key),
        "sink_seen": helper.make_tensor("", TensorProto.BOOL, seen_shape, seen),
    }
    return define(_SINK_ATTENTION.format(padding=_PADDING), constants)

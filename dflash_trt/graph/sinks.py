"""Attention sinks: one more term in every head's softmax, which no value belongs to.

A head's sink is a logit s_h: p_j = exp(q·k_j) / (exp(s_h) + sum_i exp(q·k_i)). Executors' attention
kernels know of none, so it is one more key: its value is 0, and its product with any query of the
head is s_h, since every query has one more dimension that holds s_h where the sink's key has 1
and all others 0. That is exact: s_h · 1 and 0 · x round nothing.

On the CPU that key stands behind the cache, at a place that depends on the cache's length only;
64 positions are added, because the order in which ONNX Runtime sums a row is the same for lengths
that are multiples of 64 (backends/onnxruntime/caches.py). For TensorRT, whose caches are updated
in place and must not be copied, the sink is written with each call's rows, right behind them: the
next call overwrites it. Its caches therefore have `SINK_DIMS` more dimensions and one more
position.
Kernels of this project take sinks as what they are, over caches of the model's own head size.
"""

from __future__ import annotations

import onnx
import onnx.parser

from dflash_trt.graph.bindings import SINK_DIMS
from dflash_trt.graph.form import GraphForm, Precision
from dflash_trt.graph.model import GraphBuilder

_PADDING = 64

# As TRT_Attention's bodies (functions.py), one row is put in front: q and mask by their edge.
_SINK_ATTENTION = """
<domain: "dflash", opset_import: ["" : 24]>
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


def sink_attention_function(head_dim: int) -> onnx.FunctionProto:
    """`dflash::sink_attention`: attention over a padded KV cache, with sinks.

    q [B,H_q,S,D] pre-scaled by 1/sqrt(D); k, v [B,H_kv,M,D]; mask bool [B,1,S,M]; sinks [H_q].
    """
    function = onnx.parser.parse_function(_SINK_ATTENTION.format(padding=_PADDING))
    key = [0.0] * (_PADDING * (head_dim + 1))
    key[head_dim] = 1.0
    constants = [
        onnx.helper.make_node(
            "Constant", [], [name], value=onnx.helper.make_tensor("", kind, shape, values)
        )
        for name, kind, shape, values in (
            ("sink_key", onnx.TensorProto.FLOAT, [1, 1, _PADDING, head_dim + 1], key),
            ("sink_seen", onnx.TensorProto.BOOL, [1, 1, 1, _PADDING], [1] + [0] * (_PADDING - 1)),
        )
    ]
    nodes = [*constants, *function.node]
    del function.node[:]
    function.node.extend(nodes)
    return function


def widen_queries(b: GraphBuilder, q: str, sinks: str) -> str:
    """q [B,H,S,D] with `SINK_DIMS` more dimensions, the first of which holds sinks [H]."""
    by_head = b.node("Reshape", [sinks, b.integers(1, -1, 1, 1)], "sink_heads")
    padding = b.integers(0, 0, 0, 0, 0, 0, 0, SINK_DIMS - 1)
    by_head = b.node("Pad", [by_head, padding], "sink_dimensions")
    heads = b.node("Shape", [q], "query_heads", start=0, end=3)
    shape = b.node("Concat", [heads, b.integers(SINK_DIMS)], "sink_shape", axis=0)
    columns = b.node("Expand", [by_head, shape], "sink_columns")
    return b.node("Concat", [q, columns], "q_with_sink", axis=3)


def append_sink(b: GraphBuilder, rows: str, kv: str, batch: str, head_dim: int, heads: int) -> str:
    """K or V rows [B,H,S,D] with `SINK_DIMS` more dimensions and the sink as one more row."""
    padding = b.integers(0, 0, 0, 0, 0, 0, 0, SINK_DIMS)
    wide = b.node("Pad", [rows, padding], f"{kv}_wide")
    row = [0.0] * (head_dim + SINK_DIMS)
    row[head_dim] = float(kv == "k")
    stored = b.constant(f"sink.{kv}.{head_dim}", [1, 1, 1, len(row)], row)
    shape = b.node("Concat", [batch, b.integers(heads, 1, len(row))], f"{kv}_sink_shape", axis=0)
    sink = b.node("Expand", [stored, shape], f"{kv}_sink")
    return b.node("Concat", [wide, sink], f"{kv}_with_sink", axis=2)


def stores_sinks(has_sinks: bool, form: GraphForm) -> bool:
    """Whether the caches of a model that `has_sinks` have room for them."""
    is_native = form.precision is not Precision.FLOAT32 and not form.has_kernel_caches
    return has_sinks and is_native


def cache_head_dim(head_dim: int, has_sinks: bool, form: GraphForm) -> int:
    """The head size of a cache: larger than the model's where it has room for a sink."""
    return head_dim + (SINK_DIMS if stores_sinks(has_sinks, form) else 0)

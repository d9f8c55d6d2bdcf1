"""`dflash::sink_attention`: attention with sinks, in operations that ONNX Runtime has.

A sink is one more key (see native.py). Here it stands behind the cache, where its place depends on
the cache's length only. 64 positions are added: ONNX Runtime sums rows in one order for all lengths
that are multiples of 64 (backends/onnxruntime/caches.py).
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from dflash_trt.graph.functions import define

_PADDING = 64

# One row is put in front, as in TRT_Attention's bodies (functions.py).
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

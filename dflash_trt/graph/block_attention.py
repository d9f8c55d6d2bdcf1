"""`dflash::block_attention…`: attention over caches that only this project's kernels read.

Its forms are `kv_cache_update`'s. One body defines them all, in float32; only tests run it: on
TensorRT a kernel takes its place, and graphs for the CPU have faster functions. What lies behind a
sequence's length is not read: it may be NaN.
"""

from __future__ import annotations

from functools import cache

import onnx

from dflash_trt.graph.bindings import KV
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.functions import define
from dflash_trt.graph.kv_cache_update import cache_suffix

_ATTENTION = """
block_attention{suffix} <is_causal, window> ({inputs}) => (attended)
{{
    let zero = 0, one = 1, zero_list = [0], one_list = [1], rest = [-1], group_axis = [2]
    let last_axis = [-1], nothing = 0.0, lowest = -3.0e38
{view}
    capacity_list = Shape <start = 2, end = 3> (k)
    capacity = Squeeze (capacity_list)
    rows_list = Shape <start = 2, end = 3> (q)
    rows = Squeeze (rows_list)
    key = Range (zero, capacity, one)
    row = Range (zero, rows, one)
    row_column = Unsqueeze (row, one_list)
    wide_lengths = Cast <to = 7> (key_value_lengths)
    let around = [1, 2, 3]
    length = Unsqueeze (wide_lengths, around)
    start = Sub (length, rows)
    position = Add (start, row_column)
    offset = Sub (position, key)
    held = Less (key, length)
    let causal = @is_causal
    is_free = Equal (causal, zero)
    past = GreaterOrEqual (offset, zero)
    in_order = Or (past, is_free)
    let reach = @window
    is_endless = Equal (reach, zero)
    distance = Abs (offset)
    near = Less (distance, reach)
    in_reach = Or (near, is_endless)
    visible = And (in_order, in_reach)
    seen = And (visible, held)
    seen_by_group = Unsqueeze (seen, group_axis)

    held_rows = Transpose <perm = [0, 1, 3, 2]> (held)
    k_held = Where (held_rows, k, nothing)
    v_held = Where (held_rows, v, nothing)
    k_by_group = Unsqueeze (k_held, group_axis)
    v_by_group = Unsqueeze (v_held, group_axis)
    k_turned = Transpose <perm = [0, 1, 2, 4, 3]> (k_by_group)
    kv_heads = Shape <start = 1, end = 2> (k)
    head_dim = Shape <start = 3, end = 4> (q)
    groups = Concat <axis = 0> (zero_list, kv_heads, rest, rows_list, head_dim)
    q_wide = Cast <to = 1> (q)
    q_by_group = Reshape (q_wide, groups)
    scores = MatMul (q_by_group, k_turned)
    seen_scores = Where (seen_by_group, scores, lowest)
    sink_groups = Concat <axis = 0> (one_list, kv_heads, rest, one_list, one_list)
    sinks_by_group = Reshape (sinks, sink_groups)
    of_rows = Shape <start = 0, end = 4> (scores)
    sink_shape = Concat <axis = 0> (of_rows, one_list)
    sink_column = Expand (sinks_by_group, sink_shape)
    all_scores = Concat <axis = -1> (seen_scores, sink_column)
    all_weights = Softmax <axis = -1> (all_scores)
    weights = Slice (all_weights, zero_list, rest, last_axis)
    by_group = MatMul (weights, v_by_group)
    shape = Shape (q)
    attended_wide = Reshape (by_group, shape)
    attended = CastLike (attended_wide, q)
}}
"""

_WIDE = """
    {kv}_numbers = Cast <to = 1> ({kv}_cache)"""
_SCALED = """
    {kv}_at = Constant <value_int = {at}> ()
    {kv}_scale = Gather (kv_scales, {kv}_at)
    {kv}_values = Mul ({kv}_numbers, {kv}_scale)"""
# Pages in the order of positions: [B,C,page_size,H_kv,D] to [B,H_kv,C·page_size,D].
_PAGES = """
    {kv}_pages = Gather <axis = 0> ({values}, page_table)
    {kv}_rest = Shape <start = 2, end = 4> ({kv}_cache)
    {kv}_shape = Concat <axis = 0> (zero_list, rest, {kv}_rest)
    {kv}_by_row = Reshape ({kv}_pages, {kv}_shape)
    {kv} = Transpose <perm = [0, 2, 1, 3]> ({kv}_by_row)"""
_AS_IT_LIES = """
    {kv} = Identity ({values})"""


@cache
def block_attention_function(form: GraphForm) -> onnx.FunctionProto:
    """`dflash::block_attention` with the suffix of `form`'s caches.

    q [B,H_q,S,D] pre-scaled by 1/sqrt(D), the last S of key_value_lengths int32 [B] positions;
    caches; page_table int32 [B,C] where paged; kv_scales float32 [2] where FP8; sinks float32
    [H_q], -inf for none. A row at p sees keys j that are held, j <= p where is_causal is 1, and
    |p - j| < window where that is not 0: one at least, its own.
    """
    view = ""
    for at, kv in enumerate(KV):
        view += _WIDE.format(kv=kv) + (_SCALED.format(kv=kv, at=at) if form.is_fp8 else "")
        values = f"{kv}_values" if form.is_fp8 else f"{kv}_numbers"
        view += (_PAGES if form.is_paged else _AS_IT_LIES).format(kv=kv, values=values)
    operands = ["q", "k_cache", "v_cache", "key_value_lengths"]
    operands += ["page_table"] * form.is_paged + ["kv_scales"] * form.is_fp8 + ["sinks"]
    inputs = ", ".join(operands)
    return define(_ATTENTION.format(suffix=cache_suffix(form), inputs=inputs, view=view))

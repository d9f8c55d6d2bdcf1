"""Caches on the CPU, linear or in pages, and attention that ONNX Runtime computes.

A pool [pages, page_size, kv heads, D] holds one layer's K or V of every sequence. `page_table`
int32 [B,C] names each sequence's pages in order of position; entries past its length may name any
page whose rows are finite. Pages are gathered into linear caches: the bits are theirs.
Layers with a window may have a page table of their own, which names nobody's page where rows see
nothing any more: what is masked counts as zero, whatever it is, if it is finite.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto, helper

from dflash_trt.graph.caches.rows import page_table, paging, store_rows
from dflash_trt.graph.functions import (
    DFLASH_DOMAIN,
    AttentionOverload,
    attention_function,
    define,
    grouped_attention_function,
)
from dflash_trt.graph.model_builder import LayerBuilder

# Behind the cache, a sink's place depends on the cache's length only. ONNX Runtime sums rows in one
# order for all lengths that are multiples of 64 (backends/onnxruntime/caches.py).
_PADDING = 64

# A sink is one more key (see native.py). A row is put in front as in functions.py.
_SINK_ATTENTION = """
sink_attention (q, k, v, mask, sinks) => (attended)
{{
    let front = [0, 0, 1, 0, 0, 0, 0, 0]
    rows = Pad <mode = "edge"> (q, front)
    mask_rows = Pad <mode = "edge"> (mask, front)
    let by_head = [1, -1, 1, 1], one = [1]
    heads = Shape <start = 0, end = 3> (rows)
    column_shape = Concat <axis = 0> (heads, one)
    sink_heads = Reshape (sinks, by_head)
    sink_column = Expand (sink_heads, column_shape)
    queries = Concat <axis = 3> (rows, sink_column)

    let dimension = [0, 0, 0, 0, 0, 0, 0, 1], positions = [0, 0, 0, 0, 0, 0, {padding}, 0]
    k_wide = Pad (k, dimension)
    values = Pad (v, positions)
    let ones = [1, 1]
    kv_heads = Shape <start = 0, end = 2> (k)
    keys_shape = Concat <axis = 0> (kv_heads, ones)
    sink_keys = Expand (sink_key, keys_shape)
    keys = Concat <axis = 2> (k_wide, sink_keys)

    batch = Shape <start = 0, end = 3> (mask_rows)
    seen_shape = Concat <axis = 0> (batch, one)
    seen = Expand (sink_seen, seen_shape)
    key_mask = Concat <axis = 3> (mask_rows, seen)
    padded = Attention <scale = 1.0, is_causal = 0> (queries, keys, values, key_mask)
    let end = [2147483647], row_axis = [2]
    attended = Slice (padded, one, end, row_axis)
}}
"""

AttentionCall = tuple[onnx.FunctionProto, list[str], dict[str, Any]]
"""A function, its operands and its attributes."""

# index [B,H_kv,C·page_size,3] is the (page, place, head) of every position of a sequence. It is
# equal for every layer, so that ONNX Runtime computes it once a call.
_VIEW = """
view <page_size, kv_heads> (k_cache, v_cache, page_table) => (k, v)
{
    let zero = 0, one = 1, size = @page_size, heads = @kv_heads, around_page = [1, 3]
    let around_head = [0, 2, 3], last = [-1], axis = [0]
    wide_table = Cast <to = 7> (page_table)
    page = Unsqueeze (wide_table, around_page)
    place = Range (zero, size, one)
    head_row = Range (zero, heads, one)
    head = Unsqueeze (head_row, around_head)
    batch = Shape <start = 0, end = 1> (page_table)
    columns = Shape <start = 1, end = 2> (page_table)
    size_list = Unsqueeze (size, axis)
    heads_list = Unsqueeze (heads, axis)
    grid = Concat <axis = 0> (batch, heads_list, columns, size_list)
    pages = Expand (page, grid)
    places = Expand (place, grid)
    all_heads = Expand (head, grid)
    page_index = Unsqueeze (pages, last)
    place_index = Unsqueeze (places, last)
    head_index = Unsqueeze (all_heads, last)
    index_grid = Concat <axis = -1> (page_index, place_index, head_index)
    let flat = [0, 0, -1, 3]
    index = Reshape (index_grid, flat)
    k = GatherND (k_cache, index)
    v = GatherND (v_cache, index)
}
"""


def attend_on_cpu(layer: LayerBuilder, q: str, k: str, v: str) -> str:
    """ONNX Runtime's own attention, over numbers or what E4M3 makes of them."""
    sizes, caches = layer.sizes, store_rows(layer, k, v)
    if sizes.has_sinks:
        mask = layer.rows.window_mask(sizes.window, sizes.is_causal, lambda: cache_length(layer))
        function, attributes = sink_attention_function(sizes.head_dim), dict[str, Any]()
        operands = [q, *caches, mask, layer.weight("sinks")]
    elif layer.is_int8 and sizes.heads > sizes.kv_heads:
        function, operands, attributes = _attention_by_kv_head(layer, q, caches)
    else:
        function, operands, attributes = plain_attention(layer, q, caches)
    if layer.b.form.is_paged:
        function = paged_attention_function(function)
        operands.append(page_table(layer))
        attributes |= paging(layer) | {"kv_heads": sizes.kv_heads}
    return layer.b.call(function, operands, "attend", **attributes)[0]


def linear_view(layer: LayerBuilder) -> list[str]:
    """K and V before the call, [B,kv heads,M,D], for a draft that attends to them itself."""
    if not layer.b.form.is_paged:
        return layer.caches
    operands, names = [*layer.caches, page_table(layer)], [f"{one}_view" for one in layer.caches]
    attributes = paging(layer) | {"kv_heads": layer.sizes.kv_heads}
    return layer.b.call(define(_VIEW), operands, "view", outputs=names, **attributes)


def cache_length(layer: LayerBuilder) -> str:
    """Positions [1] that a layer's caches, or its page table, have room for."""
    b = layer.b
    if b.form.page_size is None:
        return b.node("Shape", layer.caches[:1], "cache_length", start=2, end=3)
    columns = b.node("Shape", [page_table(layer)], "columns", start=1, end=2)
    return b.node("Mul", [columns, b.integers(b.form.page_size)], "cache_length")


def plain_attention(layer: LayerBuilder, q: str, caches: list[str]) -> AttentionCall:
    """Attention without sinks over linear caches: a function, its operands and its attributes."""
    sizes, rows = layer.sizes, layer.rows
    kind: AttentionOverload = "lower_right" if sizes.is_causal else "none"
    overload, mask = kind, ""
    if sizes.window is not None:
        overload, kind = "masked", "none"
        mask = rows.window_mask(sizes.window, sizes.is_causal, lambda: cache_length(layer))
    operands = [q, *caches, mask, "", rows.lengths]
    return attention_function(overload), operands, {"causal_kind": kind}


def _attention_by_kv_head(layer: LayerBuilder, q: str, caches: list[str]) -> AttentionCall:
    """That of `plain_attention`, faster. Graphs in floats keep theirs: their bytes are pinned."""
    sizes, rows, mask = layer.sizes, layer.rows, ""
    if sizes.is_causal or sizes.window is not None:
        mask = rows.window_mask(sizes.window, sizes.is_causal, lambda: cache_length(layer))
    shape = sizes.heads, sizes.kv_heads, sizes.head_dim
    function = grouped_attention_function(*shape, masked=bool(mask))
    return function, [q, *caches, mask, "", rows.lengths], {"causal_kind": "none"}


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


def paged_attention_function(linear: onnx.FunctionProto) -> onnx.FunctionProto:
    """`dflash::block_attention_paged`: a linear attention function (see functions.py) over pools.

    Inputs are those of `linear`, with pools k_cache and v_cache in place of k and v, then the page
    table. Body and overload are `linear`'s, behind a gather of k and v.
    """
    view = define(_VIEW)
    for node in view.node:  # the two bodies share a few names only
        node.input[:] = [_in_view(name) for name in node.input]
        node.output[:] = [_in_view(name) for name in node.output]
    caches = {"k": "k_cache", "v": "v_cache"}
    function = helper.make_function(
        DFLASH_DOMAIN,
        "block_attention_paged",
        [*(caches.get(name, name) for name in linear.input), "page_table"],
        list(linear.output),
        [*view.node, *linear.node],
        list(linear.opset_import),
        [*linear.attribute, *view.attribute],
    )
    function.overload = linear.overload or linear.name
    return function


def _in_view(name: str) -> str:
    return name if name in ("k", "v", "k_cache", "v_cache", "page_table") else f"view_{name}"

"""The paged KV layout, and how the CPU attends over it.

A pool [pages, page_size, kv heads, D] holds one layer's K or V of every sequence. `page_table`
int32 [B,C] names each sequence's pages in order of position; entries past its length may name any
page whose rows are finite. The CPU gathers pages into linear caches: the bits are theirs.
Layers with a window may have a page table of their own, which names nobody's page where rows see
nothing any more: what is masked counts as zero, whatever it is, if it is finite.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import helper

from dflash_trt.graph.caches.linear import cpu_attention
from dflash_trt.graph.caches.strategy import CacheStrategy, page_table, paging, write_rows
from dflash_trt.graph.functions import DFLASH_DOMAIN, define
from dflash_trt.graph.model_builder import LayerBuilder

# index [B,H_kv,C·page_size,3] is the (page, place, head) of every position of a sequence. It is
# equal for every layer, so that ONNX Runtime computes it once a call.
_VIEW = """
view <page_size, kv_heads> (k_cache, v_cache, page_table) => (k, v)
{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    size = Constant <value_int: int = @page_size> ()
    heads = Constant <value_int: int = @kv_heads> ()
    around_page = Constant <value_ints = [1, 3]> ()
    around_head = Constant <value_ints = [0, 2, 3]> ()
    last = Constant <value_ints = [-1]> ()
    axis = Constant <value_ints = [0]> ()
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
    flat = Constant <value_ints = [0, 0, -1, 3]> ()
    index = Reshape (index_grid, flat)
    k = GatherND (k_cache, index)
    v = GatherND (v_cache, index)
}
"""


@dataclass(frozen=True, slots=True)
class PagedStrategy(CacheStrategy):
    """Linear attention behind a gather of pages."""

    def attend(self, layer: LayerBuilder, q: str, k: str, v: str) -> str:
        b, caches = layer.b, write_rows(layer, k, v)
        function, operands, attributes = cpu_attention(layer, q, caches, lambda: _length(layer))
        attributes |= paging(layer) | {"kv_heads": layer.sizes.kv_heads}
        function = paged_attention_function(function)
        return b.call(function, [*operands, page_table(layer)], "attend", **attributes)[0]

    def linear_view(self, layer: LayerBuilder) -> tuple[str, str]:
        names = [f"{cache}_view" for cache in layer.caches]
        operands = [*layer.caches, page_table(layer)]
        attributes = paging(layer) | {"kv_heads": layer.sizes.kv_heads}
        k, v = layer.b.call(define(_VIEW), operands, "view", outputs=names, **attributes)
        return k, v


def _length(layer: LayerBuilder) -> str:
    """Positions [1] that the page table has room for."""
    b = layer.b
    assert b.form.page_size is not None
    columns = b.node("Shape", [page_table(layer)], "columns", start=1, end=2)
    return b.node("Mul", [columns, b.integers(b.form.page_size)], "cache_length")


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

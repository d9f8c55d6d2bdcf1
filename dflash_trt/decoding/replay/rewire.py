"""Rewirings of a bundle's graphs: one thing at a time that could have been built wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from dflash_trt.decoding.replay.edits import GraphEdit, find_node, has_node, residual_after
from dflash_trt.graph.bindings import PAGE_TABLE, cache_input
from dflash_trt.graph.caches.cpu import paged_attention_function
from dflash_trt.graph.functions import attention_function
from dflash_trt.models.rope import RopeSpec, tables

EVERYTHING = 1 << 30
"""A window that no sequence fills."""

_MASK = 3
"""The input of an attention that is its mask."""


def tap_layers(layer_ids: Sequence[int], layers: int, *, norms_last: bool = True) -> GraphEdit:
    """Of `target.onnx`: what the draft reads are the outputs of these layers of `layers`.

    `norms_last` as DraftSpec has it of last taps.
    """

    def edit(model: onnx.ModelProto) -> None:
        values = [residual_after(model, layer, layers) for layer in layer_ids]
        if norms_last and layers - 1 in layer_ids:
            last = residual_after(model, layers - 1, layers)
            normed = _norm_last(model, last)
            values = [normed if value == last else value for value in values]
        if has_node(model, "injection/taps"):
            find_node(model, "injection/taps").input[:] = values
        else:
            old = find_node(model, "injection/fc").input[0]
            for node in model.graph.node:
                if node.name.startswith("injection/"):
                    node.input[:] = [values[0] if name == old else name for name in node.input]

    return edit


def _norm_last(model: onnx.ModelProto, last: str) -> str:
    """Adds the final norm of the last layer's rows `last`, as of all rows; its value."""
    found = find_node(model, "head/norm")
    node = onnx.NodeProto()
    node.CopyFrom(found)
    node.name = node.output[0] = "moved_tap"
    node.input[0] = last
    model.graph.node.insert(list(model.graph.node).index(found), node)
    return "moved_tap"


def rotate_draft(rope: RopeSpec, head_dim: int, positions: int) -> GraphEdit:
    """Of both graphs: the draft's queries and keys turn by `rope`."""
    cos, sin = tables(rope, head_dim, positions)
    scale = np.float32(head_dim**-0.5)
    arrays = {"cos": cos, "sin": sin, "q_cos": cos * scale, "q_sin": sin * scale}

    def edit(model: onnx.ModelProto) -> None:
        used = set()
        for node in model.graph.node:
            if not node.name.startswith(("draft_layers.", "injection/draft_layers.")):
                continue
            for index, name in enumerate(node.input):
                # Stored ones are rope.OWNER.KIND, scaled ones KIND.
                kind = name.rpartition(".")[2] if name.startswith("rope.") else name
                if kind in arrays:
                    node.input[index] = f"replaced.{kind}"
                    used.add(kind)
        for kind in sorted(used):
            table = numpy_helper.from_array(arrays[kind], f"replaced.{kind}")
            model.graph.initializer.append(table)

    return edit


def set_windows(windows: Sequence[int | None], page_size: int | None) -> GraphEdit:
    """Of `draft.onnx`: how far each layer sees back and forth, None without an end."""

    def edit(model: onnx.ModelProto) -> None:
        for layer, window in enumerate(windows):
            _set_window(model, layer, window or EVERYTHING, page_size)

    return edit


def _set_window(model: onnx.ModelProto, layer: int, window: int, page_size: int | None) -> None:
    """The layer's attention gets a mask of its own, whatever it had."""
    name = f"draft_layers.{layer}/attention/attend"
    node = find_node(model, name)
    is_causal = "lower_right" in node.overload or any(
        entry.name == "causal_kind" and entry.s == b"lower_right" for entry in node.attribute
    )
    function = attention_function("masked")
    if page_size is not None:
        function = paged_attention_function(function)
    key = (function.domain, function.name, function.overload)
    if all((one.domain, one.name, one.overload) != key for one in model.functions):
        model.functions.append(function)
    is_causal = is_causal or "_causal" in node.input[_MASK]
    mask, nodes = _mask_nodes(layer, window, is_causal, page_size)
    node.input[_MASK] = mask
    node.overload = function.overload
    for attribute in node.attribute:
        if attribute.name == "causal_kind":
            attribute.s = b"none"
    at = [one.name for one in model.graph.node].index(name)
    for offset, one in enumerate(nodes):
        model.graph.node.insert(at + offset, one)


def _mask_nodes(
    layer: int, window: int, is_causal: bool, page_size: int | None
) -> tuple[str, list[onnx.NodeProto]]:
    """bool [B,1,S,M] as graph/rows.py builds it, and its nodes."""
    at = f"window.{layer}"

    def node(op: str, inputs: list[str], name: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(op, inputs, [f"{at}/{name}"], name=f"{at}/{name}", **attributes)

    nodes = [
        node("Constant", [], "zero", value_int=0),
        node("Constant", [], "one", value_int=1),
        node("Constant", [], "size", value_int=window),
        node("Constant", [], "axes", value_ints=[1, 3]),
    ]
    if page_size is None:
        nodes.append(node("Shape", [cache_input("draft", "k", layer)], "cache", start=2, end=3))
    else:
        nodes.append(node("Constant", [], "page_size", value_ints=[page_size]))
        nodes.append(node("Shape", [PAGE_TABLE], "columns", start=1, end=2))
        nodes.append(node("Mul", [f"{at}/columns", f"{at}/page_size"], "cache"))
    nodes += [
        node("Squeeze", [f"{at}/cache"], "length"),
        node("Range", [f"{at}/zero", f"{at}/length", f"{at}/one"], "keys"),
        node("Unsqueeze", ["rows/positions", f"{at}/axes"], "queries"),
        node("Sub", [f"{at}/queries", f"{at}/keys"], "offset"),
        node("Abs", [f"{at}/offset"], "distance"),
        node("Less", [f"{at}/distance", f"{at}/size"], "near"),
    ]
    if not is_causal:
        return f"{at}/near", nodes
    nodes.append(node("GreaterOrEqual", [f"{at}/offset", f"{at}/zero"], "past"))
    nodes.append(node("And", [f"{at}/near", f"{at}/past"], "near_past"))
    return f"{at}/near_past", nodes

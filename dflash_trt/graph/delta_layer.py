"""A Gated DeltaNet layer of a hybrid target, around its recurrence.

That is gated_delta.py on the CPU and by our kernel, and gated_delta_groups.py in other engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import TensorProto

from dflash_trt.graph.bindings import (
    CACHE_START,
    RECURRENT,
    ROWS_END,
    ROWS_SIDE,
    STATE_START,
    cache_input,
    cache_output,
)
from dflash_trt.graph.form import Precision
from dflash_trt.graph.functions import swiglu_function
from dflash_trt.graph.gated_delta import gated_delta_function, is_stepped_by_kernel
from dflash_trt.graph.gated_delta_groups import gated_delta_groups_function
from dflash_trt.graph.model_builder import LayerBuilder


def gated_delta(layer: LayerBuilder, x: str) -> str:
    """x [T,H] + out_proj(gated norm of the recurrence over input_layernorm(x)).

    Updates the layer's state and rows. Gated DeltaNet: arXiv 2412.06464, as Qwen3.5 has it.
    """
    b, sizes = layer.b, layer.sizes.recurrent
    assert sizes is not None
    with b.scope("gated_delta"):
        normed = layer.rms_norm(x, "input_layernorm", "norm")
        raw = [layer.linear(normed, f"in_proj_{part}") for part in ("qkv", "b", "a")]
        gate = layer.linear(normed, "in_proj_z")
        rows = b.widen(b.node("Concat", raw, "raw", axis=1), "raw_wide")
        rows = b.node("Reshape", [rows, layer.rows.shape(sizes.row_elements)], "raw_rows")
        # Of a constant, which a session computes once: no bit of it depends on the call.
        decay = b.node("Exp", [layer.weight("A_log", Precision.FLOAT32)], "decay_size")
        decay = b.node("Neg", [decay], "decay")
        weights = [
            layer.weight("conv1d", Precision.FLOAT32),
            layer.weight("dt_bias", Precision.FLOAT32),
            decay,
        ]
        by_kernel = is_stepped_by_kernel(b.form, sizes)
        in_groups = b.form.is_native and not by_kernel
        name = (_run_groups if in_groups else _run_rows)(layer, [rows, *weights])
        by_head = b.integers(-1, sizes.value_heads, sizes.head_dim)
        heads = b.node("Reshape", [name, by_head], "heads")
        heads = layer.rms_norm(heads, "gated_norm", "gated_norm", is_wide=True, is_plain=True)
        gates = b.node("Reshape", [gate, by_head], "gates")
        (gated,) = b.call(swiglu_function(), [gates, heads], "gated")
        flat = b.node("Reshape", [gated, b.integers(-1, sizes.value_elements)], "rows")
        return layer.linear(flat, "out_proj", residual=x)


def _run_rows(layer: LayerBuilder, operands: Sequence[str]) -> str:
    """y of the recurrence over `operands`, which updates both caches itself."""
    b, sizes = layer.b, layer.sizes.recurrent
    assert sizes is not None
    state, kept = (cache_input(layer.owner, kind, layer.index) for kind in RECURRENT)
    name = "/".join([*b.scopes, "step"])
    outputs = [name, cache_output(state), cache_output(kept)]
    given = [*operands, kept, state, CACHE_START, STATE_START, ROWS_END]
    attributes: dict[str, Any] = {}
    if is_stepped_by_kernel(b.form, sizes):
        given.append(ROWS_SIDE)
        attributes["replay"] = b.form.replay
    b.call(gated_delta_function(b.form, sizes), given, "step", outputs=outputs, **attributes)
    return name


def _run_groups(layer: LayerBuilder, operands: Sequence[str]) -> str:
    """The same for TensorRT, which updates both caches whole, as it updates one of K or V."""
    b, sizes = layer.b, layer.sizes.recurrent
    assert sizes is not None
    caches = [cache_input(layer.owner, kind, layer.index) for kind in RECURRENT]
    state, kept = caches
    rows = b.node("Squeeze", [kept, b.integers(1)], "kept_rows")
    names = ["/".join([*b.scopes, part]) for part in ("step", "state_after", "rows_after")]
    given = [*operands, rows, state, CACHE_START, STATE_START, ROWS_END]
    function = gated_delta_groups_function(b.form, sizes)
    y, state_after, rows_after = b.call(function, given, "step", outputs=names)
    rows_after = b.node("Unsqueeze", [rows_after, b.integers(1)], "rows_by_head")
    # Always 0, which TensorRT cannot tell: so it updates nothing in place before y is there, for
    # which both have been read.
    part = b.node("Slice", [y, b.integers(0, 0), b.integers(1, 1), b.integers(1, 2)], "one_value")
    size = b.node("Abs", [b.node("Reshape", [part, b.integers(-1)], "one_of_each")], "one_size")
    none = b.node("Constant", [], "no_size", value_float=0.0)
    never = b.node("Less", [size, none], "is_never")
    place = b.node("Cast", [never], "place", to=TensorProto.INT64)
    for cache, after in zip(caches, (state_after, rows_after), strict=True):
        b.node(
            "TensorScatter",
            [cache, after, place],
            f"{cache}_update",
            output=cache_output(cache),
            axis=2,
        )
    return y

"""A Gated DeltaNet layer of a hybrid target, around the recurrence of gated_delta.py."""

from __future__ import annotations

from dflash_trt.graph.bindings import (
    CACHE_START,
    RECURRENT,
    ROWS_END,
    STATE_START,
    cache_input,
    cache_output,
)
from dflash_trt.graph.form import Precision
from dflash_trt.graph.functions import swiglu_function
from dflash_trt.graph.gated_delta import gated_delta_function
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
        rows = b.node("Concat", raw, "raw", axis=1)
        rows = b.node("Reshape", [rows, layer.rows.shape(sizes.row_elements)], "raw_rows")
        # Of a constant, which a session computes once: no bit of it depends on the call.
        decay = b.node("Exp", [layer.weight("A_log", Precision.FLOAT32)], "decay_size")
        decay = b.node("Neg", [decay], "decay")
        state, kept = (cache_input(layer.owner, kind, layer.index) for kind in RECURRENT)
        operands = [
            rows,
            layer.weight("conv1d", Precision.FLOAT32),
            layer.weight("dt_bias", Precision.FLOAT32),
            decay,
            kept,
            state,
            CACHE_START,
            STATE_START,
            ROWS_END,
        ]
        name = "/".join([*b.scopes, "step"])
        outputs = [name, cache_output(state), cache_output(kept)]
        b.call(gated_delta_function(b.form, sizes), operands, "step", outputs=outputs)
        by_head = b.integers(-1, sizes.value_heads, sizes.head_dim)
        heads = b.node("Reshape", [name, by_head], "heads")
        heads = layer.rms_norm(heads, "gated_norm", "gated_norm", is_plain=True)
        gates = b.node("Reshape", [gate, by_head], "gates")
        (gated,) = b.call(swiglu_function(), [gates, heads], "gated")
        flat = b.node("Reshape", [gated, b.integers(-1, sizes.value_elements)], "rows")
        return layer.linear(flat, "out_proj", residual=x)

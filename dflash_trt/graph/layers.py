"""The pieces of target and draft: embedding, attention, recurrence, MLP, output head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import TensorProto

from dflash_trt.graph import bindings as io
from dflash_trt.graph.caches import attend
from dflash_trt.graph.dflash2.convolution import Convolution, convolve
from dflash_trt.graph.form import Precision
from dflash_trt.graph.functions import geglu_function, swiglu_function
from dflash_trt.graph.gated_delta import gated_delta_function, is_stepped_by_kernel
from dflash_trt.graph.gated_delta_groups import gated_delta_groups_function
from dflash_trt.graph.model_builder import LayerBuilder, ModelBuilder
from dflash_trt.graph.quantized import int8_product
from dflash_trt.graph.rope_tables import HEAD_ROWS, HEAD_TOKENS, query_scale
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.models.sizes import RecurrentSizes


def embed(model: ModelBuilder, scale: float | None = None) -> str:
    """Rows [T,H] of the call's token ids [B,S], times `scale`, None for the model's own."""
    b, role = model.b, "embed_tokens"
    with b.scope("embed"):
        x = look_up(model, role, b.node("Reshape", [model.rows.ids, b.integers(-1)], "ids"))
        factor = model.spec.embedding_scale if scale is None else scale
        if factor == 1.0:
            return x
        wide = b.node("Constant", [], "factor_wide", value_float=factor)
        return b.node("Mul", [x, b.narrow(wide, "factor")], "scaled")


def look_up(model: ModelBuilder, role: str, tokens: str) -> str:
    """Rows [T,n] of the table `role` for tokens [T].

    Looked up as stored and then cast; in a narrow compute type cast first, so that an engine holds
    one copy of a table that is the output head as well.
    """
    b = model.b
    if b.form.precision is not Precision.FLOAT32:
        return b.node("Gather", [model.weight(role), tokens], "lookup", axis=0)
    x = b.node("Gather", [model.stored(role), tokens], "lookup", axis=0)
    is_wide = model.entry(role).dtype == "F32"
    return x if is_wide else b.node("Cast", [x], "rows", to=TensorProto.FLOAT)


def lm_head(model: ModelBuilder, normed: str) -> str:
    """Rows [T,H] to logits [T,V], through the embedding where the target ties them."""
    role = "lm_head" if model.has("lm_head") else "embed_tokens"
    return cap_logits(model, model.linear(normed, role, name="lm_head"))


def choose_among(
    model: ModelBuilder, stored: Mapping[str, TensorEntry], normed: str
) -> tuple[str, str | None]:
    """Logits [T,K] of rows [T,H], and the value that holds the K tokens; None where K is all."""
    b = model.b
    if HEAD_ROWS not in stored:  # a draft's own head has its rows in the checkpoint
        tokens = HEAD_TOKENS in stored and b.stored(HEAD_TOKENS, stored[HEAD_TOKENS])
        return lm_head(model, normed), tokens or None
    if copy := b.int8(HEAD_ROWS):
        logits = int8_product(b, normed, copy, "lm_head")
    else:
        rows = b.weight(HEAD_ROWS, stored[HEAD_ROWS])
        logits = b.node("Gemm", [normed, rows], "lm_head", transB=1)
    return cap_logits(model, logits), b.stored(HEAD_TOKENS, stored[HEAD_TOKENS])


def cap_logits(model: ModelBuilder, logits: str) -> str:
    """Logits l [T,V], times the model's multiplier, as cap · tanh(l / cap) where it has a cap."""
    b, cap, multiplier = model.b, model.spec.logit_cap, model.spec.logit_multiplier
    if multiplier != 1.0:
        factor = b.constant("logit_multiplier", [], [multiplier])
        logits = b.node("Mul", [logits, factor], "multiplied")
    if cap is None:
        return logits
    limit = b.constant("logit_cap", [], [cap])
    bent = b.node("Tanh", [b.node("Div", [logits, limit], "of_cap")], "bent")
    return b.node("Mul", [bent, limit], "capped")


def gated_mlp(layer: LayerBuilder, x: str) -> str:
    """x [T,H] + down(act(gate(n)) * up(n)) of n = post_attention_layernorm(x).

    Where the layer has an output norm, it is taken of what is added to x.
    """
    with layer.b.scope("mlp"):
        normed = layer.rms_norm(x, "post_attention_layernorm", "norm")
        normed, both = convolve(layer, normed, "mlp_conv")
        rows = activated(layer, normed)
        return _add_output(layer, x, rows, "down_proj", "mlp_output_norm", both)


def activated(layer: LayerBuilder, normed: str) -> str:
    """What an MLP's down_proj reads of normed rows n [T,H]: act(gate(n)) * up(n)."""
    gate, up = layer.linear(normed, "gate_proj"), layer.linear(normed, "up_proj")
    is_silu = layer.spec.activation == "silu"
    function, name = (swiglu_function(), "swiglu") if is_silu else (geglu_function(), "geglu")
    (result,) = layer.b.call(function, [gate, up], name)
    return result


def attention(layer: LayerBuilder, x: str) -> str:
    """x [T,H] + o_proj(attention(input_layernorm(x))), writing the rows' K and V into the cache."""
    b, sizes = layer.b, layer.sizes
    with b.scope("attention"):
        normed = layer.rms_norm(x, "input_layernorm", "norm")
        normed, both = convolve(layer, normed, "attention_conv")
        gate = None
        if sizes.has_gate:
            q, gate = split_gated(layer, normed)
        else:
            q = split_heads(layer, normed, "q", sizes.heads)
        keys = _project(layer, normed, "k", sizes.kv_heads)
        k = _by_head(layer, keys, "k")
        values = keys if sizes.keys_are_values else _project(layer, normed, "v", sizes.kv_heads)
        v = _by_head(layer, values, "v")
        q, k = turn_queries(layer, q), turn_keys(layer, k)
        attended = attend(layer, q, k, v)
        merged = b.node("Transpose", [attended], "by_row", perm=[0, 2, 1, 3])
        width = sizes.heads * sizes.head_dim
        flat = b.node("Reshape", [merged, b.integers(-1, width)], "rows")
        if gate is not None:
            flat = open_gate(layer, flat, gate)
        return _add_output(layer, x, flat, "o_proj", "attention_output_norm", both)


def turn_queries(layer: LayerBuilder, q: str) -> str:
    """q [B,heads,S,D] turned by its rows' positions, and scaled for attention."""
    b, tables, part = layer.b, layer.tables, _turned_part(layer)
    if part:
        scale = b.constant("query_scale", [], [query_scale(layer.spec)])
        q = b.node("Mul", [q, scale], "q_scaled")
    # The query tables carry 1/sqrt(D), so that no other node has to scale q.
    queries = tables.keys(b) if part else tables.queries(b)
    return b.node("RotaryEmbedding", [q, *queries, layer.rows.positions], "q_rope", **part)


def turn_keys(layer: LayerBuilder, k: str) -> str:
    """k [B,kv heads,S,D] turned by its rows' positions."""
    operands = [k, *layer.tables.keys(layer.b), layer.rows.positions]
    return layer.b.node("RotaryEmbedding", operands, "k_rope", **_turned_part(layer))


def _turned_part(layer: LayerBuilder) -> dict[str, Any]:
    """The attribute of RoPE that turns a part of each head; none where it turns all."""
    turned = layer.spec.rotary_dim
    return {} if turned is None else {"rotary_embedding_dim": turned}


def open_gate(layer: LayerBuilder, x: str, gate: str) -> str:
    """Attention's rows x [T,n] times how far their gate [T,n] is open."""
    b = layer.b
    return b.node("Mul", [x, b.node("Sigmoid", [gate], "open")], "gated")


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
        kernel, bias = (layer.weight(one, Precision.FLOAT32) for one in ("conv1d", "dt_bias"))
        name = _recur(layer, sizes, [rows, kernel, bias, decay])
        by_head = b.integers(-1, sizes.value_heads, sizes.head_dim)
        heads = b.node("Reshape", [name, by_head], "heads")
        heads = layer.rms_norm(heads, "gated_norm", "gated_norm", is_wide=True, is_plain=True)
        gates = b.node("Reshape", [gate, by_head], "gates")
        (gated,) = b.call(swiglu_function(), [gates, heads], "gated")
        flat = b.node("Reshape", [gated, b.integers(-1, sizes.value_elements)], "rows")
        return layer.linear(flat, "out_proj", residual=x)


def _recur(layer: LayerBuilder, sizes: RecurrentSizes, operands: list[str]) -> str:
    """y of the recurrence over `operands`, which updates the layer's state and rows.

    By a kernel of ours or on the CPU the function updates both; else TensorRT does, whole, as it
    updates one of K or V.
    """
    b, places = layer.b, [io.CACHE_START, io.STATE_START, io.ROWS_END]
    state, kept = (io.cache_input(layer.owner, kind, layer.index) for kind in io.RECURRENT)
    name = "/".join([*b.scopes, "step"])
    by_kernel = is_stepped_by_kernel(b.form, sizes)
    if by_kernel or not b.form.is_native:
        given = [*operands, kept, state, *places, *[io.ROWS_SIDE] * by_kernel]
        attributes: dict[str, Any] = {"replay": b.form.replay} if by_kernel else {}
        outputs = [name, io.cache_output(state), io.cache_output(kept)]
        b.call(gated_delta_function(b.form, sizes), given, "step", outputs=outputs, **attributes)
        return name
    rows = b.node("Squeeze", [kept, b.integers(1)], "kept_rows")
    names = [name, *("/".join([*b.scopes, part]) for part in ("state_after", "rows_after"))]
    function = gated_delta_groups_function(b.form, sizes)
    operands = [*operands, rows, state, *places]
    y, state_after, rows_after = b.call(function, operands, "step", outputs=names)
    rows_after = b.node("Unsqueeze", [rows_after, b.integers(1)], "rows_by_head")
    # Always 0, which TensorRT cannot tell: so it updates nothing in place before y is there, for
    # which both have been read.
    part = b.node("Slice", [y, b.integers(0, 0), b.integers(1, 1), b.integers(1, 2)], "one_value")
    size = b.node("Abs", [b.node("Reshape", [part, b.integers(-1)], "one_of_each")], "one_size")
    none = b.node("Constant", [], "no_size", value_float=0.0)
    never = b.node("Less", [size, none], "is_never")
    place = b.node("Cast", [never], "place", to=TensorProto.INT64)
    for cache, after in ((state, state_after), (kept, rows_after)):
        updated, operands = io.cache_output(cache), [cache, after, place]
        b.node("TensorScatter", operands, f"{cache}_update", output=updated, axis=2)
    return y


def _add_output(
    layer: LayerBuilder, x: str, rows: str, role: str, norm: str, both: Convolution | None
) -> str:
    """x [T,H] + the linear `role` of `rows`, convolved, or with its norm where there is one."""
    if both is not None:
        convolved = both.apply(layer.linear(rows, role), behind=True)
        return layer.b.node("Add", [x, convolved], f"{role}_add")
    if not layer.has(norm):
        return layer.linear(rows, role, residual=x)
    normed = layer.rms_norm(layer.linear(rows, role), norm, norm)
    return layer.b.node("Add", [x, normed], f"{norm}_add")


def split_gated(layer: LayerBuilder, x: str) -> tuple[str, str]:
    """Projects rows [T,H] to q [B,heads,S,D], normed, and a gate [T,heads·D]; a head has both."""
    b, heads, size = layer.b, layer.sizes.heads, layer.sizes.head_dim
    projected = layer.linear(x, "q_proj")
    both = b.node("Reshape", [projected, layer.rows.shape(heads, 2 * size)], "q_and_gate")
    axis = b.integers(3)
    q = b.node("Slice", [both, b.integers(0), b.integers(size), axis], "q_split")
    gate = b.node("Slice", [both, b.integers(size), b.integers(2 * size), axis], "gate_split")
    gate = b.node("Reshape", [gate, b.integers(-1, heads * size)], "gate")
    q = layer.rms_norm(q, "q_norm", "q_norm")
    return b.node("Transpose", [q], "q_heads", perm=[0, 2, 1, 3]), gate


def split_heads(layer: LayerBuilder, x: str, kind: str, heads: int) -> str:
    """Projects rows [T,H] to [B,heads,S,D], with the per-head norm where the layer has one."""
    return _by_head(layer, _project(layer, x, kind, heads), kind)


def _project(layer: LayerBuilder, x: str, kind: str, heads: int) -> str:
    """Rows [T,H] to [B,S,heads,D]."""
    projected = layer.linear(x, f"{kind}_proj")
    shape = layer.rows.shape(heads, layer.sizes.head_dim)
    return layer.b.node("Reshape", [projected, shape], f"{kind}_split")


def _by_head(layer: LayerBuilder, split: str, kind: str) -> str:
    """[B,S,heads,D] to [B,heads,S,D], with the per-head norm where the layer has one."""
    norm = f"{kind}_norm"
    if layer.has(norm):
        split = layer.rms_norm(split, norm, norm)
    elif kind == "v" and layer.sizes.norms_values:
        split = layer.unit_norm(split, layer.sizes.head_dim, norm)
    return layer.b.node("Transpose", [split], f"{kind}_heads", perm=[0, 2, 1, 3])

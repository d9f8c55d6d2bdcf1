"""The pieces that the target and the draft share: embedding, attention, MLP, output head."""

from __future__ import annotations

from onnx import TensorProto

from dflash_trt.graph.caches import cache_strategy
from dflash_trt.graph.form import Precision
from dflash_trt.graph.functions import swiglu_function
from dflash_trt.graph.model_builder import LayerBuilder, ModelBuilder


def embed(model: ModelBuilder) -> str:
    """Rows [T,H] of the call's token ids [B,S].

    Looked up as stored and then cast; in a narrow compute type cast first, so that an engine holds
    one copy of a table that is the output head as well.
    """
    b, role = model.b, "embed_tokens"
    with b.scope("embed"):
        flat = b.node("Reshape", [model.rows.ids, b.integers(-1)], "ids")
        if b.form.precision is not Precision.FLOAT32:
            return b.node("Gather", [model.weight(role), flat], "lookup", axis=0)
        x = b.node("Gather", [model.stored(role), flat], "lookup", axis=0)
        if model.entry(role).dtype == "F32":
            return x
        return b.node("Cast", [x], "rows", to=TensorProto.FLOAT)


def lm_head(model: ModelBuilder, normed: str) -> str:
    """Rows [T,H] to logits [T,V], through the embedding where the target ties them."""
    role = "lm_head" if model.has("lm_head") else "embed_tokens"
    return model.linear(normed, role, name="lm_head")


def swiglu_mlp(layer: LayerBuilder, x: str) -> str:
    """x [T,H] + down(silu(gate(n)) * up(n)) of n = post_attention_layernorm(x)."""
    with layer.b.scope("mlp"):
        normed = layer.rms_norm(x, "post_attention_layernorm", "norm")
        gate, up = layer.linear(normed, "gate_proj"), layer.linear(normed, "up_proj")
        (activated,) = layer.b.call(swiglu_function(), [gate, up], "swiglu")
        return layer.linear(activated, "down_proj", residual=x)


def attention(layer: LayerBuilder, x: str) -> str:
    """x [T,H] + o_proj(attention(input_layernorm(x))), writing the rows' K and V into the cache."""
    b, sizes, tables, rows = layer.b, layer.sizes, layer.tables, layer.rows
    with b.scope("attention"):
        normed = layer.rms_norm(x, "input_layernorm", "norm")
        q = _heads(layer, normed, "q", sizes.heads)
        k = _heads(layer, normed, "k", sizes.kv_heads)
        v = _heads(layer, normed, "v", sizes.kv_heads)
        # The query tables carry 1/sqrt(D), so that no node has to scale q.
        q = b.node("RotaryEmbedding", [q, *tables.queries(b), rows.positions], "q_rope")
        k = b.node("RotaryEmbedding", [k, *tables.keys(b), rows.positions], "k_rope")
        attended = cache_strategy(b.form).attend(layer, q, k, v)
        merged = b.node("Transpose", [attended], "by_row", perm=[0, 2, 1, 3])
        width = sizes.heads * sizes.head_dim
        flat = b.node("Reshape", [merged, b.integers(-1, width)], "rows")
        return layer.linear(flat, "o_proj", residual=x)


def _heads(layer: LayerBuilder, x: str, kind: str, heads: int) -> str:
    """Projects rows [T,H] to [B,heads,S,D], with the per-head norm where the layer has one."""
    b, norm = layer.b, f"{kind}_norm"
    projected = layer.linear(x, f"{kind}_proj")
    shape = layer.rows.shape(heads, layer.sizes.head_dim)
    split = b.node("Reshape", [projected, shape], f"{kind}_split")
    if layer.has(norm):
        split = layer.rms_norm(split, norm, norm)
    return b.node("Transpose", [split], f"{kind}_heads", perm=[0, 2, 1, 3])

"""Which checkpoint tensor has which role, and which shape, as data.

`{i}` is the layer, `{full}` one with attention that sees everything, `{sliding}` one with a window
where those differ, `{linear}` one without attention, `{e}` the expert. Shapes are written in the
symbols of `DecoderSizes.symbols`, `MoeSpec.symbols` and "vocab", with `*` between factors; "?" is
any size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Shape = tuple[str, ...]
Rules = Mapping[str, tuple[str, Shape]]
"""Role → (checkpoint name, symbolic shape)."""

ExpertStorage = Literal["float", "separate", "MXFP4", "NVFP4"]
"""How experts lie; "separate" are floats one by one in a family that is published otherwise."""


def of_layer(rows: str, layer: str = "i", inner: str = "", prefix: str = "") -> Rules:
    """The weights of a layer, one a line: name, then the terms of its shape.

    The role is the last part of the name, or what stands before a colon. `inner` comes before
    every name, `prefix` before every role.
    """
    rules: dict[str, tuple[str, Shape]] = {}
    for row in rows.strip().splitlines():
        stated, *shape = row.split()
        role, _, name = stated.rpartition(":")
        role = role or name.rpartition(".")[2]
        if "bias" not in role and not name.endswith("!"):
            name += ".weight"
        place = f"layers.{{{layer}}}."
        rules[place + prefix + role] = (place + inner + name.removesuffix("!"), tuple(shape))
    return rules


_ATTENTION = """
q_proj heads*head_dim hidden
k_proj kv_heads*head_dim hidden
v_proj kv_heads*head_dim hidden
o_proj hidden heads*head_dim
"""
_MLP = """
gate_proj intermediate hidden
up_proj intermediate hidden
down_proj hidden intermediate
"""
ATTENTION_WEIGHTS: Rules = {
    **of_layer("input_layernorm hidden"),
    **of_layer(_ATTENTION, inner="self_attn."),
    **of_layer("post_attention_layernorm hidden"),
}
MLP_WEIGHTS = of_layer(_MLP, inner="mlp.")
LAYER_WEIGHTS: Rules = {**ATTENTION_WEIGHTS, **MLP_WEIGHTS}
QK_NORM_WEIGHTS = of_layer("q_norm head_dim\nk_norm head_dim", inner="self_attn.")

ATTENTION_BIASES: Rules = {
    f"{role}.bias": (name.replace(".weight", ".bias"), shape[:1])
    for role, (name, shape) in of_layer(_ATTENTION, inner="self_attn.").items()
}
QKV_BIASES: Rules = {role: rule for role, rule in ATTENTION_BIASES.items() if "o_proj" not in role}

OUTPUT_NORM_WEIGHTS = of_layer("""
    attention_output_norm:post_attention_layernorm hidden
    post_attention_layernorm:pre_feedforward_layernorm hidden
    mlp_output_norm:post_feedforward_layernorm hidden
""")
"""Gemma's four norms a layer. What other families call post_attention_layernorm, the norm before
the MLP, has another name there, and the norm of that name is another one."""

GATED_DELTA_WEIGHTS = of_layer(
    """
    in_proj_qkv channels hidden
    in_proj_z values hidden
    in_proj_b value_heads hidden
    in_proj_a value_heads hidden
    conv1d channels one kernel
    A_log:A_log! value_heads
    dt_bias:dt_bias value_heads
    gated_norm:norm value_dim
    out_proj hidden values
    """,
    layer="linear",
    inner="linear_attn.",
)
"""Of the layers without attention, {linear}; {full} are the others."""

LAYER_SCALARS = of_layer("layer_scalar:layer_scalar! one")
"""What a Gemma 4 multiplies a layer's output by."""

SINK_WEIGHTS = of_layer("sinks:sinks! heads", inner="self_attn.")
GPT_OSS_ROUTER = of_layer("router experts hidden\nrouter.bias:router.bias experts", inner="mlp.")


def _experts(rows: str) -> Rules:
    return of_layer(rows, inner="mlp.experts.", prefix="experts.")


GPT_OSS_BIASES = _experts("""
    gate_up.bias:gate_up_proj_bias experts gate_up
    down.bias:down_proj_bias experts hidden
""")
GPT_OSS_EXPERTS: Mapping[ExpertStorage, Rules] = {
    "float": _experts("""
        gate_up:gate_up_proj! experts hidden gate_up
        down:down_proj! experts expert_ffn hidden
    """),
    "MXFP4": _experts("""
        gate_up.blocks:gate_up_proj_blocks! experts gate_up hidden_blocks block_bytes
        gate_up.scales:gate_up_proj_scales! experts gate_up hidden_blocks
        down.blocks:down_proj_blocks! experts hidden ffn_blocks block_bytes
        down.scales:down_proj_scales! experts hidden ffn_blocks
    """),
    "NVFP4": _experts("""
        gate_up.blocks:gate_up_proj! experts hidden_bytes gate_up
        gate_up.weight_scale:gate_up_proj_weight_scale! experts hidden_steps gate_up
        gate_up.weight_scale_2:gate_up_proj_weight_scale_2!
        down.blocks:down_proj! experts ffn_bytes hidden
        down.weight_scale:down_proj_weight_scale! experts ffn_steps hidden
        down.weight_scale_2:down_proj_weight_scale_2!
    """),
}
"""All experts of a layer in one tensor; gate and up alternate along "gate_up". Floats lie
[in, out], MXFP4 [out, in / 32] blocks of 16 bytes with one E8M0 scale each. NVFP4 lies as
ModelOpt exports fused experts: bytes [in / 2, out], E4M3 scales [in / 16, out]."""

QWEN3_MOE_ROUTER = of_layer("router:gate experts hidden", inner="mlp.")
QWEN3_MOE_EXPERTS: Mapping[ExpertStorage, Rules] = {
    "float": _experts("""
        {e}.gate:{e}.gate_proj expert_ffn hidden
        {e}.up:{e}.up_proj expert_ffn hidden
        {e}.down:{e}.down_proj hidden expert_ffn
    """)
}
"""Three tensors [out, in] for each expert."""

QWEN3_5_MOE_EXPERTS: Mapping[ExpertStorage, Rules] = {
    "float": _experts("""
        gate_up.rows:gate_up_proj! experts gate_up hidden
        down.rows:down_proj! experts hidden expert_ffn
    """),
    "separate": QWEN3_MOE_EXPERTS["float"],
}
"""All experts of a layer in one tensor [out, in], the rows of gate before those of up; or, as
transformers writes them, one by one."""

GEMMA4_EXPERTS: Mapping[ExpertStorage, Rules] = {
    "float": {
        role: (name.replace(".mlp.", "."), shape)
        for role, (name, shape) in QWEN3_5_MOE_EXPERTS["float"].items()
    }
}
BESIDE_EXPERTS: Rules = {
    **MLP_WEIGHTS,
    **of_layer("""
        router:router.proj experts hidden
        router_scale:router.scale! hidden
        expert_scales:router.per_expert_scale! experts
        mlp_norm:post_feedforward_layernorm_1 hidden
        experts_norm:pre_feedforward_layernorm_2 hidden
        experts_output_norm:post_feedforward_layernorm_2 hidden
    """),
}
"""Gemma 4's MLP, and the router and the norms of the experts beside it."""

SHARED_EXPERT: Rules = {
    **of_layer(_MLP, inner="mlp.shared_expert.", prefix="shared_expert."),
    **of_layer("shared_gate:shared_expert_gate one hidden", inner="mlp."),
}
"""An MLP that every row goes through, and the gate of what it gives."""

BODY_WEIGHTS: Rules = {
    "embed_tokens": ("embed_tokens.weight", ("vocab", "hidden")),
    "norm": ("norm.weight", ("hidden",)),
}

HEAD_NAME = "lm_head.weight"
HEAD_SHAPE: Shape = ("vocab", "hidden")
"""Present unless the embedding is tied; the one target weight without the prefix."""

DRAFT_WEIGHTS: Rules = {
    "fc": ("fc.weight", ("hidden", "?")),
    "hidden_norm": ("hidden_norm.weight", ("hidden",)),
    "norm": ("norm.weight", ("hidden",)),
    **LAYER_WEIGHTS,
    **QK_NORM_WEIGHTS,
}
"""The DFlash draft of z-lab's contract: no prefix, no biases, no embedding, no lm_head."""

LINEARS = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("in_proj_qkv", "in_proj_z", "out_proj", "fc", "lm_head", "dynamic", "selector_gate"),
    }
)
"""Last parts of the roles of matrices that a checkpoint may quantise."""

HARMLESS_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Buffers of old exporters, which the config determines."""

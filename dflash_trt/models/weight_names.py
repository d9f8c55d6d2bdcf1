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

ATTENTION_WEIGHTS: Rules = {
    "layers.{i}.input_layernorm": ("layers.{i}.input_layernorm.weight", ("hidden",)),
    "layers.{i}.q_proj": ("layers.{i}.self_attn.q_proj.weight", ("heads*head_dim", "hidden")),
    "layers.{i}.k_proj": ("layers.{i}.self_attn.k_proj.weight", ("kv_heads*head_dim", "hidden")),
    "layers.{i}.v_proj": ("layers.{i}.self_attn.v_proj.weight", ("kv_heads*head_dim", "hidden")),
    "layers.{i}.o_proj": ("layers.{i}.self_attn.o_proj.weight", ("hidden", "heads*head_dim")),
    "layers.{i}.post_attention_layernorm": (
        "layers.{i}.post_attention_layernorm.weight",
        ("hidden",),
    ),
}

LAYER_WEIGHTS: Rules = {
    **ATTENTION_WEIGHTS,
    "layers.{i}.gate_proj": ("layers.{i}.mlp.gate_proj.weight", ("intermediate", "hidden")),
    "layers.{i}.up_proj": ("layers.{i}.mlp.up_proj.weight", ("intermediate", "hidden")),
    "layers.{i}.down_proj": ("layers.{i}.mlp.down_proj.weight", ("hidden", "intermediate")),
}

QK_NORM_WEIGHTS: Rules = {
    "layers.{i}.q_norm": ("layers.{i}.self_attn.q_norm.weight", ("head_dim",)),
    "layers.{i}.k_norm": ("layers.{i}.self_attn.k_norm.weight", ("head_dim",)),
}

ATTENTION_BIASES: Rules = {
    "layers.{i}.q_proj.bias": ("layers.{i}.self_attn.q_proj.bias", ("heads*head_dim",)),
    "layers.{i}.k_proj.bias": ("layers.{i}.self_attn.k_proj.bias", ("kv_heads*head_dim",)),
    "layers.{i}.v_proj.bias": ("layers.{i}.self_attn.v_proj.bias", ("kv_heads*head_dim",)),
    "layers.{i}.o_proj.bias": ("layers.{i}.self_attn.o_proj.bias", ("hidden",)),
}
QKV_BIASES: Rules = {role: rule for role, rule in ATTENTION_BIASES.items() if "o_proj" not in role}

OUTPUT_NORM_WEIGHTS: Rules = {
    "layers.{i}.attention_output_norm": (
        "layers.{i}.post_attention_layernorm.weight",
        ("hidden",),
    ),
    "layers.{i}.post_attention_layernorm": (
        "layers.{i}.pre_feedforward_layernorm.weight",
        ("hidden",),
    ),
    "layers.{i}.mlp_output_norm": ("layers.{i}.post_feedforward_layernorm.weight", ("hidden",)),
}
"""Gemma's four norms a layer. What other families call post_attention_layernorm, the norm before
the MLP, has another name there, and the norm of that name is another one."""

GATED_DELTA_WEIGHTS: Rules = {
    f"layers.{{linear}}.{role}": (f"layers.{{linear}}.linear_attn.{name}", shape)
    for role, name, shape in (
        ("in_proj_qkv", "in_proj_qkv.weight", ("channels", "hidden")),
        ("in_proj_z", "in_proj_z.weight", ("values", "hidden")),
        ("in_proj_b", "in_proj_b.weight", ("value_heads", "hidden")),
        ("in_proj_a", "in_proj_a.weight", ("value_heads", "hidden")),
        ("conv1d", "conv1d.weight", ("channels", "one", "kernel")),
        ("A_log", "A_log", ("value_heads",)),
        ("dt_bias", "dt_bias", ("value_heads",)),
        ("gated_norm", "norm.weight", ("value_dim",)),
        ("out_proj", "out_proj.weight", ("hidden", "values")),
    )
}
"""Of the layers without attention, {linear}; {full} are the others."""

LAYER_SCALARS: Rules = {"layers.{i}.layer_scalar": ("layers.{i}.layer_scalar", ("one",))}
"""What a Gemma 4 multiplies a layer's output by."""

SINK_WEIGHTS: Rules = {"layers.{i}.sinks": ("layers.{i}.self_attn.sinks", ("heads",))}

GPT_OSS_ROUTER: Rules = {
    "layers.{i}.router": ("layers.{i}.mlp.router.weight", ("experts", "hidden")),
    "layers.{i}.router.bias": ("layers.{i}.mlp.router.bias", ("experts",)),
}


def _fused(parts: Mapping[str, tuple[str, str, str]]) -> Rules:
    """gpt-oss's two matrices of experts: end of role → end of name, shape of gate_up, of down."""
    return {
        f"layers.{{i}}.experts.{matrix}{part}": (
            f"layers.{{i}}.mlp.experts.{matrix}_proj{suffix}",
            tuple(shapes[number].split()),
        )
        for number, matrix in enumerate(("gate_up", "down"))
        for part, (suffix, *shapes) in parts.items()
    }


GPT_OSS_BIASES = _fused({".bias": ("_bias", "experts gate_up", "experts hidden")})
GPT_OSS_EXPERTS: Mapping[ExpertStorage, Rules] = {
    "float": _fused({"": ("", "experts hidden gate_up", "experts expert_ffn hidden")}),
    "MXFP4": _fused(
        {
            ".blocks": (
                "_blocks",
                "experts gate_up hidden_blocks block_bytes",
                "experts hidden ffn_blocks block_bytes",
            ),
            ".scales": ("_scales", "experts gate_up hidden_blocks", "experts hidden ffn_blocks"),
        }
    ),
    "NVFP4": _fused(
        {
            ".blocks": ("", "experts hidden_bytes gate_up", "experts ffn_bytes hidden"),
            ".weight_scale": (
                "_weight_scale",
                "experts hidden_steps gate_up",
                "experts ffn_steps hidden",
            ),
            ".weight_scale_2": ("_weight_scale_2", "", ""),
        }
    ),
}
"""All experts of a layer in one tensor; gate and up alternate along "gate_up". Floats lie
[in, out], MXFP4 [out, in / 32] blocks of 16 bytes with one E8M0 scale each. NVFP4 lies as
ModelOpt exports fused experts: bytes [in / 2, out], E4M3 scales [in / 16, out]."""

QWEN3_MOE_ROUTER: Rules = {
    "layers.{i}.router": ("layers.{i}.mlp.gate.weight", ("experts", "hidden"))
}
QWEN3_MOE_EXPERTS: Mapping[ExpertStorage, Rules] = {
    "float": {
        "layers.{i}.experts.{e}.gate": (
            "layers.{i}.mlp.experts.{e}.gate_proj.weight",
            ("expert_ffn", "hidden"),
        ),
        "layers.{i}.experts.{e}.up": (
            "layers.{i}.mlp.experts.{e}.up_proj.weight",
            ("expert_ffn", "hidden"),
        ),
        "layers.{i}.experts.{e}.down": (
            "layers.{i}.mlp.experts.{e}.down_proj.weight",
            ("hidden", "expert_ffn"),
        ),
    }
}
"""Three tensors [out, in] for each expert."""

QWEN3_5_MOE_EXPERTS: Mapping[ExpertStorage, Rules] = {
    "float": _fused({".rows": ("", "experts gate_up hidden", "experts hidden expert_ffn")}),
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
    **{role: rule for role, rule in LAYER_WEIGHTS.items() if ".mlp." in rule[0]},
    "layers.{i}.router": ("layers.{i}.router.proj.weight", ("experts", "hidden")),
    "layers.{i}.router_scale": ("layers.{i}.router.scale", ("hidden",)),
    "layers.{i}.expert_scales": ("layers.{i}.router.per_expert_scale", ("experts",)),
    "layers.{i}.mlp_norm": ("layers.{i}.post_feedforward_layernorm_1.weight", ("hidden",)),
    "layers.{i}.experts_norm": ("layers.{i}.pre_feedforward_layernorm_2.weight", ("hidden",)),
    "layers.{i}.experts_output_norm": (
        "layers.{i}.post_feedforward_layernorm_2.weight",
        ("hidden",),
    ),
}
"""Gemma 4's MLP, and the router and the norms of the experts beside it."""

SHARED_EXPERT: Rules = {
    **{
        role.replace("{i}.", "{i}.shared_expert."): (name.replace("mlp.", "mlp.shared_expert."), on)
        for role, (name, on) in LAYER_WEIGHTS.items()
        if ".mlp." in name
    },
    "layers.{i}.shared_gate": ("layers.{i}.mlp.shared_expert_gate.weight", ("one", "hidden")),
}
"""An MLP that every row goes through, and the gate of what it gives."""

BODY_WEIGHTS: Rules = {
    "embed_tokens": ("embed_tokens.weight", ("vocab", "hidden")),
    "norm": ("norm.weight", ("hidden",)),
}

HEAD_NAME = "lm_head.weight"
HEAD_WEIGHTS: Rules = {"lm_head": (HEAD_NAME, ("vocab", "hidden"))}
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
        *("in_proj_qkv", "in_proj_z", "out_proj", "fc", "lm_head"),
    }
)
"""Last parts of the roles of matrices that a checkpoint may quantise."""

HARMLESS_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Buffers of old exporters, which the config determines."""

"""Families as data: which checkpoint tensor plays which role, and in which shape.

`{i}` is the layer; shapes are written in the symbols of `DecoderDims.symbols` and "vocab",
with `*` between factors; "?" is a size that the family leaves open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Shape = tuple[str, ...]
Rules = Mapping[str, tuple[str, Shape]]
"""Role → (checkpoint name, symbolic shape)."""

FamilyName = Literal["qwen3", "llama"]

LAYER_WEIGHTS: Rules = {
    "layers.{i}.input_layernorm": ("layers.{i}.input_layernorm.weight", ("hidden",)),
    "layers.{i}.q_proj": ("layers.{i}.self_attn.q_proj.weight", ("heads*head_dim", "hidden")),
    "layers.{i}.k_proj": ("layers.{i}.self_attn.k_proj.weight", ("kv_heads*head_dim", "hidden")),
    "layers.{i}.v_proj": ("layers.{i}.self_attn.v_proj.weight", ("kv_heads*head_dim", "hidden")),
    "layers.{i}.o_proj": ("layers.{i}.self_attn.o_proj.weight", ("hidden", "heads*head_dim")),
    "layers.{i}.post_attention_layernorm": (
        "layers.{i}.post_attention_layernorm.weight",
        ("hidden",),
    ),
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
    {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc", "lm_head"}
)
"""Last parts of the roles of matrices in products: those that a checkpoint may quantise."""

HARMLESS_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Buffers that old exporters saved and that are recomputed from the config."""


@dataclass(frozen=True, slots=True)
class Family:
    """A target architecture; `default_head_dim` is transformers' own when the config is silent."""

    name: FamilyName
    architecture: str
    qk_norm: bool
    default_head_dim: int | None = None
    prefix: str = "model."
    must_be_off: tuple[str, ...] = ()
    """Config flags that change the computation in a way that is not supported."""


FAMILIES: tuple[Family, ...] = (
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        qk_norm=True,
        default_head_dim=128,
        must_be_off=("use_sliding_window",),
    ),
    Family("llama", "LlamaForCausalLM", qk_norm=False, must_be_off=("mlp_bias",)),
)

DRAFT_ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel")
"""Names under which drafts of the contract are published."""

DRAFT_DEFAULT_HEAD_DIM = 128
"""The draft's config is a Qwen3 config."""


def target_rules(family: Family, *, attention_bias: bool, tied: bool) -> Rules:
    """Every weight that a target of `family` has."""
    body = {**BODY_WEIGHTS, **LAYER_WEIGHTS}
    if family.qk_norm:
        body |= QK_NORM_WEIGHTS
    if attention_bias:
        body |= ATTENTION_BIASES
    rules = {role: (family.prefix + name, shape) for role, (name, shape) in body.items()}
    return rules if tied else {**rules, **HEAD_WEIGHTS}

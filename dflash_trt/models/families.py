"""Families as data: what a target's config states, and which weights it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dflash_trt.models.weight_names import (
    ATTENTION_BIASES,
    ATTENTION_WEIGHTS,
    BESIDE_EXPERTS,
    BODY_WEIGHTS,
    GATED_DELTA_WEIGHTS,
    GEMMA4_EXPERTS,
    GPT_OSS_BIASES,
    GPT_OSS_EXPERTS,
    GPT_OSS_ROUTER,
    HEAD_NAME,
    HEAD_SHAPE,
    LAYER_SCALARS,
    LAYER_WEIGHTS,
    OUTPUT_NORM_WEIGHTS,
    QK_NORM_WEIGHTS,
    QKV_BIASES,
    QWEN3_5_MOE_EXPERTS,
    QWEN3_MOE_EXPERTS,
    QWEN3_MOE_ROUTER,
    SHARED_EXPERT,
    SINK_WEIGHTS,
    ExpertStorage,
    Rules,
    Shape,
)

Routing = Literal["chosen", "all"]
WindowRule = Literal["none", "alternate", "qwen2", "every", "pattern"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class ExpertRules:
    """How a family's config and checkpoint state its mixture of experts.

    `routing` is the order of softmax and choice: "chosen" takes the softmax over the chosen
    experts' logits, "all" chooses by a softmax over all. `is_clamped` is gpt-oss's SwiGLU. Of
    `count_keys` (transformers 4 and 5 differ) a config states one. `shared_key` has the width of
    an expert, or an MLP, that every row goes through, `chosen_key` how many a row chooses.
    `is_normalized`: shares are scaled to a sum of 1 though no config says so.
    """

    common: Rules
    experts: Mapping[ExpertStorage, Rules]
    count_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    size_key: str = "moe_intermediate_size"
    routing: Routing = "all"
    is_clamped: bool = False
    shared_key: str | None = None
    chosen_key: str = "num_experts_per_tok"
    is_normalized: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A target architecture; defaults are transformers' own where the config is silent."""

    name: str
    architecture: str
    qk_norm: bool = False
    default_head_dim: int | None = None
    default_attention_bias: bool = False
    prefix: str = "model."
    other_prefixes: tuple[str, ...] = ()
    """Others that the same weights are published or saved under."""
    must_be_off: tuple[str, ...] = ()
    """Config flags that change the computation in a way that is not supported."""
    has_output_bias: bool = True
    """Whether o_proj has a bias too where q, k and v have theirs."""
    windows: WindowRule = "none"
    """Which layers see `sliding_window` positions; layers.py has the rules."""
    has_sinks: bool = False
    is_gemma: bool = False
    """Norms multiply by 1 + w and there are four a layer; embeddings take √hidden; layers that
    slide have a RoPE of their own; `query_pre_attn_scalar` scales queries."""
    is_hybrid: bool = False
    """Layers of Gated DeltaNet between layers of attention with an output gate, which turns a part
    of each head; norms multiply by 1 + w."""
    is_gemma4: bool = False
    """A Gemma whose norms multiply by w, with heads of two kinds (layers.py), norms of values, a
    factor at the end of each layer, and a cap of logits; nothing scales queries."""
    text_key: str | None = None
    """The config's key that has the text model; None where the config is its own."""
    silent: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for keys that published configs leave out."""
    unused: tuple[str, ...] = ()
    """How the names of tensors begin that belong to other parts of the model."""
    activation: Activation = "silu"
    default_tied: bool = False
    experts: ExpertRules | None = None

    @property
    def mlp_key(self) -> str:
        """The config's key of the width of the MLP that all rows go through."""
        shared = None if self.experts is None else self.experts.shared_key
        return shared or "intermediate_size"

    @property
    def head_name(self) -> str:
        """The output head's tensor: beside the text model where that has it within."""
        within = self.prefix.removesuffix(".model.")
        return HEAD_NAME if within == self.prefix else f"{within}.{HEAD_NAME}"

    @property
    def own_keys(self) -> tuple[str, ...]:
        """Those of `FOREIGN_KEYS` that its configs have."""
        capped = ("final_logit_softcapping",) if self.is_gemma4 else ()
        return (*(HYBRID_KEYS if self.is_hybrid else ()), *capped, self.mlp_key)

    @property
    def norm_offset(self) -> float:
        """What norms add to w before they multiply by it."""
        return float(self.is_hybrid or (self.is_gemma and not self.is_gemma4))


QWEN3_5_EXPERTS = ExpertRules(
    common={**QWEN3_MOE_ROUTER, **SHARED_EXPERT},
    experts=QWEN3_5_MOE_EXPERTS,
    shared_key="shared_expert_intermediate_size",
    is_normalized=True,
)

GEMMA4_MIXTURE = ExpertRules(
    count_keys=("num_experts",),
    common=BESIDE_EXPERTS,
    experts=GEMMA4_EXPERTS,
    shared_key="intermediate_size",
    chosen_key="top_k_experts",
    is_normalized=True,
)
"""Of a Gemma 4 whose config has them: experts beside the MLP that all rows go through."""

GEMMA3_SILENT: Mapping[str, int] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
"""Sizes of which the 4B's config states half."""

GEMMA3 = Family(
    "gemma3",
    "Gemma3ForCausalLM",
    qk_norm=True,
    default_head_dim=256,
    must_be_off=("use_bidirectional_attention",),
    windows="pattern",
    is_gemma=True,
    silent=GEMMA3_SILENT,
    activation="gelu_tanh",
    default_tied=True,
)
GEMMA3_BESIDE = ("vision_tower.", "multi_modal_projector.")
"""What of a Gemma 3 from 4B on sees."""

GEMMA4_BESIDE = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
"""What of a Gemma 4 sees and hears."""

GEMMA4 = Family(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    qk_norm=True,
    default_head_dim=256,
    prefix="model.language_model.",
    must_be_off=("attention_bias",),
    windows="pattern",
    is_gemma=True,
    is_gemma4=True,
    text_key="text_config",
    unused=tuple(f"model.{part}." for part in GEMMA4_BESIDE),
    activation="gelu_tanh",
    default_tied=True,
)

QWEN3_5 = Family(
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    qk_norm=True,
    default_head_dim=256,
    prefix="model.language_model.",
    must_be_off=("attention_bias",),
    is_hybrid=True,
    text_key="text_config",
    unused=("model.visual.", "mtp."),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
    experts=QWEN3_5_EXPERTS,
)
TEXT_ALONE: Mapping[str, Any] = {
    "prefix": "model.",
    "other_prefixes": ("model.language_model.",),
    "text_key": None,
}
"""Of a family whose text model is the whole; saved out of one that sees, it keeps its names."""

FAMILIES: list[Family] = [
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        qk_norm=True,
        default_head_dim=128,
        must_be_off=("use_sliding_window",),
    ),
    Family("llama", "LlamaForCausalLM", must_be_off=("mlp_bias",)),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        default_attention_bias=True,
        has_output_bias=False,
        windows="qwen2",
    ),
    Family("mistral", "MistralForCausalLM", must_be_off=("attention_bias",), windows="every"),
    GEMMA3,
    replace(
        GEMMA3,
        architecture="Gemma3ForConditionalGeneration",
        prefix="model.language_model.",
        other_prefixes=("language_model.model.",),
        text_key="text_config",
        unused=(*GEMMA3_BESIDE, *(f"model.{part}" for part in GEMMA3_BESIDE)),
    ),
    GEMMA4,
    replace(GEMMA4, architecture="Gemma4ForCausalLM", **TEXT_ALONE),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        default_head_dim=64,
        default_attention_bias=True,
        windows="alternate",
        has_sinks=True,
        experts=ExpertRules(
            count_keys=("num_local_experts", "num_experts"),
            size_key="intermediate_size",
            routing="chosen",
            is_clamped=True,
            common={**GPT_OSS_ROUTER, **GPT_OSS_BIASES},
            experts=GPT_OSS_EXPERTS,
        ),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        default_head_dim=128,
        must_be_off=("use_sliding_window",),
        experts=ExpertRules(QWEN3_MOE_ROUTER, QWEN3_MOE_EXPERTS),
    ),
    QWEN3_5,
    replace(QWEN3_5, architecture="Qwen3_5ForCausalLM", **TEXT_ALONE),
    QWEN3_5_MOE,
    replace(QWEN3_5_MOE, architecture="Qwen3_5MoeForCausalLM", **TEXT_ALONE),
]
"""All that are known; programs may append their own."""

REFUSED_FAMILIES: Mapping[str, tuple[str, str]] = {
    "Gemma4UnifiedForConditionalGeneration": (
        "unified Gemma 4",
        "images and sounds without towers",
    ),
    "Phi3ForCausalLM": ("Phi-3 or Phi-4", "q, k and v are one matrix, as are gate and up"),
}
"""Architecture → what it is, and what of it is not known here."""

FOREIGN_KEYS = tuple(
    "attn_logit_softcapping dual_chunk_attention_config final_logit_softcapping "
    "first_k_dense_replace full_attention_interval kv_lora_rank linear_num_key_heads "
    "moe_layer_freq n_group n_shared_experts num_nextn_predict_layers num_shared_experts "
    "q_lora_rank routed_scaling_factor scoring_func shared_expert_intermediate_size".split()
)
"""Config keys of other or newer families: each says that more is computed than is known here."""

HYBRID_KEYS = ("full_attention_interval", "linear_num_key_heads")
"""Those of them that hybrids are described by."""

NORM_EPS = 1e-6
"""transformers' own where the config is silent."""

DRAFT_ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel", "DFlash2DraftModel")
"""Names under which drafts of the contract are published."""

DRAFT_DEFAULT_HEAD_DIM = 128
"""The draft's config is a Qwen3 config."""


def target_rules(
    family: Family,
    *,
    attention_bias: bool,
    tied: bool,
    storage: ExpertStorage = "float",
    keys_are_values: bool = False,
) -> Rules:
    """Every weight that a target of `family` has; `storage` is its experts'.

    `keys_are_values`: a Gemma 4's layers that see everything have no v.
    """
    layer = LAYER_WEIGHTS
    if family.experts is not None:
        layer = {**ATTENTION_WEIGHTS, **family.experts.common, **family.experts.experts[storage]}
    body = {**BODY_WEIGHTS, **layer}
    if family.qk_norm:
        body |= QK_NORM_WEIGHTS
    if family.is_gemma:
        body |= OUTPUT_NORM_WEIGHTS
    if attention_bias:
        body |= ATTENTION_BIASES if family.has_output_bias else QKV_BIASES
    if family.has_sinks:
        body |= SINK_WEIGHTS
    if family.is_hybrid:
        body = {_of_full(role): (_of_full(name), shape) for role, (name, shape) in body.items()}
        name, _ = body["layers.{full}.q_proj"]
        body["layers.{full}.q_proj"] = (name, ("queries_gates", "hidden"))
        body |= GATED_DELTA_WEIGHTS
    if family.is_gemma4:
        body = {**_by_kind(body, keys_are_values=keys_are_values), **LAYER_SCALARS}
    rules = {role: (family.prefix + name, shape) for role, (name, shape) in body.items()}
    return rules if tied else {**rules, "lm_head": (family.head_name, HEAD_SHAPE)}


def _of_full(name: str) -> str:
    """Weights of attention, as those of layers that have it, or that see everything."""
    own = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    return name.replace("{i}", "{full}") if any(part in name for part in own) else name


def _by_kind(body: Rules, *, keys_are_values: bool) -> Rules:
    """Weights of attention in the sizes of layers that slide, and of those that do not."""
    sizes = {"kv_heads": "full_kv_heads", "head_dim": "full_head_dim"}
    rules: dict[str, tuple[str, Shape]] = {}
    for role, (name, shape) in body.items():
        if _of_full(role) == role:
            rules[role] = (name, shape)
            continue
        rules[role.replace("{i}", "{sliding}")] = (name.replace("{i}", "{sliding}"), shape)
        if not (keys_are_values and role.endswith("v_proj")):
            terms = [[sizes.get(part, part) for part in term.split("*")] for term in shape]
            rules[_of_full(role)] = (_of_full(name), tuple(map("*".join, terms)))
    return rules


def find_family(architecture: str | None) -> Family | None:
    """The family whose configs state `architecture`; None where it is not known."""
    return next((one for one in FAMILIES if one.architecture == architecture), None)

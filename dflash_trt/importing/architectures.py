"""GGUF's architectures as data: which tensor has which role of a family, which keys are known.

Roles are those of `dflash_trt/checkpoints/weight_names.py`. Names of tensors: llama.cpp's, as in
the package gguf. "name[{e}]" is part `e` of a tensor that holds all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dflash_trt.checkpoints.families import Family, find_family
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError, nearest

TENSORS: Mapping[str, str] = {
    "embed_tokens": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
    "layers.{i}.input_layernorm": "blk.{i}.attn_norm.weight",
    "layers.{i}.q_proj": "blk.{i}.attn_q.weight",
    "layers.{i}.k_proj": "blk.{i}.attn_k.weight",
    "layers.{i}.v_proj": "blk.{i}.attn_v.weight",
    "layers.{i}.o_proj": "blk.{i}.attn_output.weight",
    "layers.{i}.q_proj.bias": "blk.{i}.attn_q.bias",
    "layers.{i}.k_proj.bias": "blk.{i}.attn_k.bias",
    "layers.{i}.v_proj.bias": "blk.{i}.attn_v.bias",
    "layers.{i}.o_proj.bias": "blk.{i}.attn_output.bias",
    "layers.{i}.q_norm": "blk.{i}.attn_q_norm.weight",
    "layers.{i}.k_norm": "blk.{i}.attn_k_norm.weight",
    "layers.{i}.post_attention_layernorm": "blk.{i}.ffn_norm.weight",
    "layers.{i}.gate_proj": "blk.{i}.ffn_gate.weight",
    "layers.{i}.up_proj": "blk.{i}.ffn_up.weight",
    "layers.{i}.down_proj": "blk.{i}.ffn_down.weight",
    "layers.{i}.router": "blk.{i}.ffn_gate_inp.weight",
    "layers.{i}.experts.{e}.gate": "blk.{i}.ffn_gate_exps.weight[{e}]",
    "layers.{i}.experts.{e}.up": "blk.{i}.ffn_up_exps.weight[{e}]",
    "layers.{i}.experts.{e}.down": "blk.{i}.ffn_down_exps.weight[{e}]",
}

ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3's scaling, which has no keys: what each pair's frequency is divided by."""

BIAS_PROBE = "blk.0.attn_q.bias"
"""A family's attention has its biases everywhere or nowhere, where its config may choose."""

_COMMON_KEYS = (
    "block_count context_length embedding_length feed_forward_length vocab_size "
    "attention.head_count attention.head_count_kv attention.key_length attention.value_length "
    "attention.layer_norm_rms_epsilon rope.freq_base rope.dimension_count rope.scaling.type "
    "rope.scaling.factor rope.scaling.original_context_length rope.scaling.finetuned "
    "rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow tensor_data_layout"
).split()
_EXPERT_KEYS = "expert_count expert_used_count expert_feed_forward_length".split()


@dataclass(frozen=True, slots=True)
class Architecture:
    """A value of general.architecture.

    `hf_name` is the same model's in a config.json. In `has_turned_heads` the rows of q and k lie
    in the order of llama.cpp's first RoPE, which turns neighbours: 0, D/2, 1, D/2 + 1 …
    """

    name: str
    hf_name: str
    model_type: str
    has_turned_heads: bool = False
    keys: frozenset[str] = frozenset(_COMMON_KEYS)

    @property
    def family(self) -> Family:
        family = find_family(self.hf_name)
        assert family is not None
        return family


ARCHITECTURES = [
    Architecture("llama", "LlamaForCausalLM", "llama", has_turned_heads=True),
    Architecture("qwen2", "Qwen2ForCausalLM", "qwen2"),
    Architecture("qwen3", "Qwen3ForCausalLM", "qwen3"),
    Architecture(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        keys=frozenset([*_COMMON_KEYS, *_EXPERT_KEYS]),
    ),
]

_FROM_HF = "build it from its Hugging Face checkpoint"
_DRAFT = "is a DFlash draft, not a target: drafts are not imported from GGUF"
_REFUSED: Mapping[object, tuple[str, str]] = {
    "gemma3": (
        "is known to `build`, and not imported from GGUF: its tokenizer is no byte-level BPE",
        _FROM_HF,
    ),
    "gpt-oss": ("is known to `build`, and not imported from GGUF", _FROM_HF),
    "dflash": (_DRAFT, "pass its Hugging Face checkpoint as the draft"),
    "dflash-draft": (_DRAFT, "pass its Hugging Face checkpoint as the draft"),
    "eagle3": ("is an EAGLE-3 drafter, not a target", "pass the GGUF file of a target"),
}


def find_architecture(name: object) -> Architecture:
    """The one of this name; DflashError (without a place) for all others."""
    for one in ARCHITECTURES:
        if one.name == name:
            return one
    if name in _REFUSED:
        what, fix = _REFUSED[name]
        raise DflashError(f"architecture {quoted(name)} {what}", fix=fix)
    hint = nearest(str(name), [one.name for one in ARCHITECTURES])
    raise DflashError(f"architecture {quoted(name)} is not supported{hint}")

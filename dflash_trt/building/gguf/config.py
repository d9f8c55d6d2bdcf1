"""config.json from the keys of a GGUF file, and llama.cpp's architectures as data.

Roles are those of `dflash_trt/models/weight_names.py`. Names of tensors: llama.cpp's, as in
the package gguf. "name[{e}]" is part `e` of a tensor that holds all experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.building.gguf.gguf_file import GgufFile
from dflash_trt.core.arrays import FloatArray
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import nearest
from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.decoder import read_sizes
from dflash_trt.models.families import Family, find_family
from dflash_trt.models.moe import read_moe
from dflash_trt.models.rope import (
    DEFAULT_THETA,
    Llama3Scaling,
    RopeSpec,
    inverse_frequencies,
    read_rope,
)
from dflash_trt.models.sizes import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, DecoderSizes

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
)
_EXPERT_KEYS = "expert_count expert_used_count expert_feed_forward_length"
_FROM_HF = "build the model from its Hugging Face checkpoint"
_DRAFT = "a DFlash draft, not a target: drafts are not imported from GGUF"
_OTHER_ARCHITECTURES = {
    "gemma3": "known to `build`, and not imported from GGUF: its tokenizer is no byte-level BPE",
    "gpt-oss": "known to `build`, and not imported from GGUF",
    "dflash": _DRAFT,
    "dflash-draft": _DRAFT,
    "eagle3": "an EAGLE-3 drafter, not a target",
}
_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_OTHER_KINDS = {
    "adapter": "a LoRA adapter, not a model: merge it into its model first",
    "mmproj": "a projector of images or sound, not a language model",
    "imatrix": "an importance matrix, not a model",
    "vocab": "a vocabulary without weights",
}

# llama.cpp has these as numbers of its code: Llama 3.1 and 3.2 differ in the factor only.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192
# The converter computes the factors in float32, where the blend is steep.
_FACTOR_TOLERANCE = 1e-4


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
    keys: frozenset[str] = frozenset(_COMMON_KEYS.split())

    @property
    def family(self) -> Family:
        family = find_family(self.hf_name)
        assert family is not None
        return family


_MOE_KEYS = frozenset(f"{_COMMON_KEYS} {_EXPERT_KEYS}".split())
ARCHITECTURES = {
    one.name: one
    for one in (
        Architecture("llama", "LlamaForCausalLM", "llama", has_turned_heads=True),
        Architecture("qwen2", "Qwen2ForCausalLM", "qwen2"),
        Architecture("qwen3", "Qwen3ForCausalLM", "qwen3"),
        Architecture("qwen3moe", "Qwen3MoeForCausalLM", "qwen3_moe", keys=_MOE_KEYS),
    )
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What config.json says, the sizes in it, and the symbols that shapes are written in."""

    architecture: Architecture
    values: dict[str, Any]
    sizes: DecoderSizes
    symbols: Mapping[str, int]
    attention_bias: bool
    tied: bool


def find_architecture(file: GgufFile) -> Architecture:
    """Finds the architecture of a whole model.

    Raises:
        DflashError: a part of a split model, an adapter or another companion of a model, or an
            architecture that is not supported.
    """
    part = _SPLIT_NAME.search(file.path.name)
    count = file.single("split.count", 1)
    if (part and part[2] != "00001") or count not in (0, 1):
        which = (
            f"part {int(part[1])} of {int(part[2])}" if part else f"one of {quoted(count)} parts"
        )
        fix = "join them first: llama-gguf-split --merge FIRST.gguf WHOLE.gguf"
        raise file.error(f"is {which} of a model", fix)
    kind = file.single("general.type", "model")
    if kind != "model":
        what = _OTHER_KINDS.get(str(kind), f"of type {quoted(kind)}")
        raise file.error(f"is {what}", "pass the GGUF file of a language model")
    name = file.single("general.architecture", "")
    if name in ARCHITECTURES:
        return ARCHITECTURES[str(name)]
    if name in _OTHER_ARCHITECTURES:
        what = f"architecture {quoted(name)} is {_OTHER_ARCHITECTURES[str(name)]}"
        raise file.error(what, "pass its Hugging Face checkpoint, or the GGUF file of a target")
    hint = nearest(str(name), list(ARCHITECTURES))
    raise file.error(f"architecture {quoted(name)} is not supported{hint}")


def make_config(file: GgufFile, architecture: Architecture, dtype: str) -> ModelConfig:
    """Makes the config of the model in `file`, but for its tokens.

    `rope_factors` of Llama 3 are not in it yet, see `add_rope_factors`.

    Raises:
        DflashError: a key is missing, has a bad value, or says that more is computed than is
            known here.
    """
    prefix = f"{architecture.name}."
    stated = {
        key.removeprefix(prefix): value
        for key, value in file.fields.items()
        if key.startswith(prefix)
    }
    for key, value in stated.items():
        is_off = isinstance(value, int | float) and not value
        if key not in architecture.keys and not is_off:
            hint = nearest(key, sorted(architecture.keys)) if len(key) < 64 else ""
            raise file.error(
                f"key {quoted(prefix + key)} = {quoted(value)} is not known{hint}",
                f"it may change what the model computes; {_FROM_HF}",
            )
    keys, family = ConfigFields(stated, file.path, prefix), architecture.family
    attention_bias = family.default_attention_bias or BIAS_PROBE in file.tensors
    tied = TENSORS["lm_head"] not in file.tensors
    values: dict[str, Any] = {
        "architectures": [architecture.hf_name],
        "model_type": architecture.model_type,
        "dtype": dtype,
        **_dimensions(keys),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", high=1.0),
        "rope_parameters": _rope_parameters(keys),
        "hidden_act": "silu",
        "attention_bias": attention_bias,
        "tie_word_embeddings": tied,
        **_experts(keys, architecture),
    }
    config = ConfigFields(values, file.path)
    sizes = read_sizes(config, family.default_head_dim)
    read_rope(config)
    moe = read_moe(config, family, sizes.hidden_size, None)
    symbols = sizes.symbols() | ({} if moe is None else moe.symbols(sizes.hidden_size))
    return ModelConfig(architecture, values, sizes, symbols, attention_bias, tied)


def add_rope_factors(config: ModelConfig, factors: FloatArray, file: GgufFile) -> None:
    """Adds Llama 3's RoPE scaling where `factors`, one a pair, are what it gives.

    Raises:
        DflashError: they are those of another scaling.
    """
    rope = config.values["rope_parameters"]
    head_dim = config.sizes.layer.head_dim
    if np.all(factors == 1):
        return
    factor = float(factors.max())
    theta = rope["rope_theta"]
    scaling = Llama3Scaling(factor, _LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL)
    plain, fits = inverse_frequencies(RopeSpec(theta), head_dim), False
    if factors.shape == plain.shape and factor > 1 and rope["rope_type"] == "default":
        scaled = inverse_frequencies(RopeSpec(theta, scaling), head_dim)
        fits = bool(np.allclose(plain / scaled, factors, rtol=_FACTOR_TOLERANCE, atol=0))
    if not fits:
        raise file.error("rope_freqs.weight scales RoPE in another way than Llama 3's", _FROM_HF)
    rope |= {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def _dimensions(keys: ConfigFields) -> dict[str, int]:
    hidden = keys.integer("embedding_length", high=MAX_WIDTH)
    heads = keys.integer("attention.head_count", high=MAX_HEADS)
    head_dim = hidden // heads
    for key in ("rope.dimension_count", "attention.key_length"):  # the latter knows better
        head_dim = keys.integer(key, head_dim, high=MAX_WIDTH)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim, high=MAX_WIDTH) != head_dim:
            raise keys.unsupported(key, f"it must be the head size, {head_dim}")
    return {
        "num_hidden_layers": keys.integer("block_count", high=MAX_LAYERS),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length", high=MAX_WIDTH),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads, high=MAX_HEADS),
        "head_dim": head_dim,
    }


def _rope_parameters(keys: ConfigFields) -> dict[str, Any]:
    theta = keys.number("rope.freq_base", DEFAULT_THETA, low=1.0)
    kind = keys.text("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind != "yarn":
        raise keys.unsupported("rope.scaling.type", "none and yarn are, and Llama 3's factors")
    rope: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        if keys.has(f"rope.scaling.yarn_{name}"):
            rope[name] = keys.number(f"rope.scaling.yarn_{name}")
    return rope


def _experts(keys: ConfigFields, architecture: Architecture) -> dict[str, Any]:
    if architecture.family.experts is None:
        return {}
    # llama.cpp's graph of Qwen3-MoE always divides by the sum of the chosen experts' weights, and
    # has experts in every layer.
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", high=MAX_WIDTH),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }

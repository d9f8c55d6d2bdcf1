"""config.json from the keys of a GGUF file, and llama.cpp's architectures as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.building.gguf.gguf_file import GgufFile
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import nearest
from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.decoder import read_sizes
from dflash_trt.models.families import Family, find_family
from dflash_trt.models.layers import FULL, GEMMA_PERIOD, SLIDING
from dflash_trt.models.moe import read_moe
from dflash_trt.models.rope import (
    DEFAULT_THETA,
    Llama3Scaling,
    RopeSpec,
    inverse_frequencies,
    read_rope,
    read_ropes_by_kind,
)
from dflash_trt.models.sizes import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, DecoderSizes

ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3's scaling, which has no keys: what each pair's frequency is divided by."""
HEAD = "output.weight"
BIAS_PROBE = "blk.0.attn_q.bias"
"""A family's attention has its biases everywhere or nowhere, where its config may choose."""
FROM_HF = "build the model from its Hugging Face checkpoint"

_KEYS = frozenset(
    "block_count context_length embedding_length feed_forward_length vocab_size "
    "attention.head_count attention.head_count_kv attention.key_length attention.value_length "
    "attention.layer_norm_rms_epsilon rope.freq_base rope.dimension_count rope.scaling.type "
    "rope.scaling.factor rope.scaling.original_context_length rope.scaling.finetuned "
    "rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow tensor_data_layout".split()
)
_EXPERT_KEYS = frozenset(("expert_count", "expert_used_count", "expert_feed_forward_length"))
_PERIOD, _LOCAL_THETA = "attention.sliding_window_pattern", "rope.freq_base_swa"
_GEMMA_KEYS = frozenset(("attention.sliding_window", _PERIOD, _LOCAL_THETA))
_LAYERS_OF_27B = 62
"""By their number llama.cpp knows the Gemma 3 whose queries other than the head size scales."""

# llama.cpp has these as numbers of its code: Llama 3.1 and 3.2 differ in the factor only.
_LLAMA3: Mapping[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The converter computes the factors in float32, where the blend is steep.
_FACTOR_TOLERANCE = 1e-4


ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
"""By general.architecture, the architecture and the model_type of a config.json."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What config.json says, the sizes in it, and the symbols that shapes are written in.

    `architecture` is llama.cpp's name.
    """

    architecture: str
    family: Family
    values: dict[str, Any]
    sizes: DecoderSizes
    symbols: Mapping[str, int]


def make_config(file: GgufFile, dtype: str) -> ModelConfig:
    """Makes the config of the model in `file`, but for its tokens.

    `rope_factors` of Llama 3 are not in it yet, see `add_rope_factors`.

    Raises:
        DflashError: no whole model of an architecture that is supported; or a key is missing, has
            a bad value, or says that more is computed than is known here.
    """
    count = file.single("split.count", 1)
    if count not in (0, 1):
        fix = "join them first: llama-gguf-split --merge FIRST.gguf WHOLE.gguf"
        raise file.error(f"is one of {quoted(count)} parts of a model", fix)
    kind = file.single("general.type", "model")
    if kind != "model":
        what = f"is of type {quoted(kind)}, no language model"
        raise file.error(what, "pass the GGUF file of a language model")
    name = str(file.single("general.architecture", ""))
    if name not in ARCHITECTURES:
        hint = nearest(name, list(ARCHITECTURES))
        raise file.error(f"architecture {quoted(name)} is not imported from GGUF{hint}", FROM_HF)
    hf_name, model_type = ARCHITECTURES[name]
    prefix, family = f"{name}.", find_family(hf_name)
    assert family is not None
    stated = {
        key.removeprefix(prefix): value
        for key, value in file.fields.items()
        if key.startswith(prefix)
    }
    known = _KEYS if family.experts is None else _KEYS | _EXPERT_KEYS
    known = known | _GEMMA_KEYS if family.is_gemma else known
    for key, value in stated.items():
        is_off = isinstance(value, int | float) and not value
        if key not in known and not is_off:
            what = f"key {quoted(prefix + key)} = {quoted(value)} is not known"
            raise file.error(what, f"it may change what the model computes; {FROM_HF}")
    keys = ConfigFields(stated, file.path, prefix)
    values: dict[str, Any] = {
        "architectures": [hf_name],
        "model_type": model_type,
        "dtype": dtype,
        **_dimensions(keys),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", high=1.0),
        "rope_parameters": _rope_parameters(keys),
        **({} if family.is_gemma else {"hidden_act": "silu"}),
        "attention_bias": family.default_attention_bias or BIAS_PROBE in file.tensors,
        "tie_word_embeddings": HEAD not in file.tensors,
    }
    if family.experts is not None:
        # llama.cpp's graph always divides by the sum of the chosen experts' weights, and has
        # experts in every layer.
        values |= {
            "num_experts": keys.integer("expert_count"),
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length", high=MAX_WIDTH),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if family.is_gemma:
        values |= _gemma_values(keys, values)
    config = ConfigFields(values, file.path)
    sizes = read_sizes(config, family.default_head_dim, family.activation)
    (read_ropes_by_kind if family.is_gemma else read_rope)(config)
    moe = read_moe(config, family, sizes.hidden_size, None)
    symbols = sizes.symbols() | ({} if moe is None else moe.symbols(sizes.hidden_size))
    return ModelConfig(name, family, values, sizes, symbols)


def add_rope_factors(config: ModelConfig, file: GgufFile) -> None:
    """Adds Llama 3's RoPE scaling where the file's factors, one a pair, are what it gives.

    Raises:
        DflashError: they are those of another scaling.
    """
    if (tensor := file.tensors.get(ROPE_FACTORS)) is None:
        return
    rope, head_dim = config.values["rope_parameters"], config.sizes.layer.head_dim
    factors = tensor.decode(0, 1)[0]
    factor, theta = float(factors.max()), rope["rope_theta"]
    plain, fits = inverse_frequencies(RopeSpec(theta), head_dim), factor == 1
    if tensor.shape == plain.shape and factor > 1 and rope["rope_type"] == "default":
        scaling = RopeSpec(theta, Llama3Scaling(factor, *_LLAMA3.values()))
        wanted = plain / inverse_frequencies(scaling, head_dim)
        fits = bool(np.allclose(wanted, factors, rtol=_FACTOR_TOLERANCE, atol=0))
        rope |= {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    if tensor.shape != plain.shape or not fits:
        raise file.error("rope_freqs.weight scales RoPE in another way than Llama 3's", FROM_HF)


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


def _gemma_values(keys: ConfigFields, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a Gemma 3's config says in addition, or otherwise, of which its file says a part."""
    layers, period = values["num_hidden_layers"], keys.integer(_PERIOD, GEMMA_PERIOD)
    scalar = values["head_dim"]
    if layers == _LAYERS_OF_27B:
        scalar = values["hidden_size"] // values["num_attention_heads"]
    local = keys.number(_LOCAL_THETA, DEFAULT_THETA, low=1.0)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": [SLIDING if (i + 1) % period else FULL for i in range(layers)],
        "rope_parameters": {
            FULL: values["rope_parameters"],
            SLIDING: {"rope_type": "default", "rope_theta": local},
        },
    }


def _rope_parameters(keys: ConfigFields) -> dict[str, Any]:
    # As llama.cpp: a scaling of no type is linear, and a factor of 0 or 1 changes nothing.
    kind, factor = keys.text("rope.scaling.type", "linear"), keys.values.get("rope.scaling.factor")
    is_plain = kind == "none" or (kind == "linear" and factor in (None, 0, 1))
    rope: dict[str, Any] = {
        "rope_type": "default" if is_plain else kind,
        "rope_theta": keys.number("rope.freq_base", DEFAULT_THETA, low=1.0),
    }
    if is_plain:
        return rope
    if kind not in ("linear", "yarn"):
        fix = "none, linear and yarn are, and Llama 3's factors"
        raise keys.unsupported("rope.scaling.type", fix)
    rope["factor"] = keys.number("rope.scaling.factor")
    if kind == "linear":
        return rope
    original = keys.integer("rope.scaling.original_context_length")
    rope["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        if keys.has(f"rope.scaling.yarn_{name}"):
            rope[name] = keys.number(f"rope.scaling.yarn_{name}")
    return rope

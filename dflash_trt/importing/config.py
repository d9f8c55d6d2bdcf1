"""config.json and generation_config.json, from the keys of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.checkpoints.config_fields import ConfigFields
from dflash_trt.checkpoints.decoder import read_sizes
from dflash_trt.checkpoints.moe import read_moe
from dflash_trt.checkpoints.rope import (
    DEFAULT_THETA,
    Llama3Scaling,
    RopeSpec,
    inverse_frequencies,
    read_rope,
)
from dflash_trt.checkpoints.sizes import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, DecoderSizes
from dflash_trt.core.arrays import FloatArray
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError, nearest
from dflash_trt.importing.architectures import BIAS_PROBE, Architecture, find_architecture
from dflash_trt.importing.header import GgufFile

_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_KINDS = {
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
class ModelConfig:
    """What config.json says, the sizes in it, and the symbols that shapes are written in."""

    architecture: Architecture
    values: dict[str, Any]
    sizes: DecoderSizes
    symbols: Mapping[str, int]
    attention_bias: bool
    tied: bool


def refuse_other_files(file: GgufFile) -> Architecture:
    """The architecture of a whole model.

    Raises:
        DflashError: a part of a split model, an adapter or another companion of a model, or an
            architecture that is not supported.
    """
    part = _SPLIT_NAME.search(file.path.name)
    count = file.single("split.count", 1)
    if part and part[2] != "00001":
        raise _split(file, f"part {int(part[1])} of {int(part[2])}")
    if count != 1 and count != 0:
        raise _split(file, f"one of {quoted(count)} parts")
    kind = file.single("general.type", "model")
    if kind != "model":
        what = _KINDS.get(str(kind), f"of type {quoted(kind)}")
        raise file.error(f"is {what}", "pass the GGUF file of a language model")
    name = file.single("general.architecture")
    if name is None:
        raise file.error("states no general.architecture", "convert the model again")
    try:
        return find_architecture(name)
    except DflashError as error:
        raise DflashError(error.what, where=file.path, fix=error.fix) from None


def make_config(file: GgufFile, architecture: Architecture, dtype: str) -> ModelConfig:
    """The config of the model in `file`, but for its tokens.

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
    _refuse_unknown(file, architecture, stated)
    keys = ConfigFields(stated, file.path, prefix)
    family = architecture.family
    attention_bias = family.default_attention_bias or BIAS_PROBE in file.tensors
    tied = "output.weight" not in file.tensors
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
    """States Llama 3's RoPE scaling where `factors`, one a pair, are what it gives.

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
        raise file.error(
            "rope_freqs.weight scales RoPE in another way than Llama 3's",
            "build the model from its Hugging Face checkpoint",
        )
    rope |= {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def _refuse_unknown(file: GgufFile, architecture: Architecture, stated: Mapping[str, Any]) -> None:
    for key, value in stated.items():
        is_off = isinstance(value, int | float) and not value
        if key not in architecture.keys and not is_off:
            hint = nearest(key, sorted(architecture.keys)) if len(key) < 64 else ""
            shown = quoted(f"{architecture.name}.{key}")
            raise file.error(
                f"key {shown} = {quoted(value)} is not known{hint}",
                "it may change what the model computes; build it from its Hugging Face checkpoint",
            )


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


def _split(file: GgufFile, which: str) -> DflashError:
    fix = "join them first: llama-gguf-split --merge FIRST.gguf WHOLE.gguf"
    return file.error(f"is {which} of a model", fix)


def generation_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json of a config that has its tokens."""
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: values[key] for key in keys if values.get(key) is not None}

"""Tiny random gpt-oss, Qwen3-MoE, Gemma 4 and Qwen3.5, in their published layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

MoeFamily = Literal["gpt_oss", "qwen3_moe"]

# gpt-oss's own numbers, with an original context so short that tiny tests run past it.
YARN_SCALING: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
EXPERT_MATRICES = ("gate_up_proj", "down_proj")


def make_moe(
    family: MoeFamily,
    common: dict[str, Any],
    experts: int,
    chosen: int,
    *,
    window: int | None,
    normalized: bool,
) -> Any:
    """A transformers model with untouched weights; `common` are keys of any config."""
    common = common | {"num_experts_per_tok": chosen}
    if family == "gpt_oss":
        own = {"attention_bias": True, "num_local_experts": experts, "sliding_window": window}
        return GptOssForCausalLM(GptOssConfig(**(common | own)))
    width = common["intermediate_size"]
    own = {"num_experts": experts, "moe_intermediate_size": width, "norm_topk_prob": normalized}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(common | own)))


def quantize_mxfp4(values: Any) -> tuple[Any, Any]:
    """Packed codes [..., K/2] and E8M0 scales [..., K/32], the smallest that clip nothing."""
    blocks = values.reshape(*values.shape[:-1], -1, 32)
    fractions, exponents = np.frexp(np.abs(blocks).max(axis=-1) / np.float32(6))
    # frexp's fraction lies in [0.5, 1), or is 0: only 0.5 is a power of two.
    powers = np.where(fractions == 0, -127, exponents - (fractions <= 0.5)).clip(-127, 127)
    steps = np.ldexp(np.float32(1), powers)[..., None]
    codes = (blocks / steps).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(values.shape)
    codes = codes & 15
    return codes[..., 0::2] | codes[..., 1::2] << 4, (powers + 127).astype(np.uint8)


def pack_experts(folder: Path) -> None:
    """Rewrites the experts of an unsharded gpt-oss checkpoint in its native MXFP4."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith(EXPERT_MATRICES)]:
        rows = tensors.pop(name).float().transpose(1, 2).contiguous().numpy()
        packed, scales = quantize_mxfp4(rows)
        blocks = packed.reshape(*scales.shape, -1)
        tensors[f"{name}_blocks"] = torch.from_numpy(blocks)
        tensors[f"{name}_scales"] = torch.from_numpy(scales)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


GEMMA_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 16,
}


def sighted_gemma3(text: Gemma3TextConfig) -> Any:
    """A Gemma 3 that sees, as those from 4B on are published."""
    images = GEMMA_VISION | {"image_size": 28, "patch_size": 14}
    common: Any = {"tie_word_embeddings": text.tie_word_embeddings, "mm_tokens_per_image": 4}
    sees = Gemma3Config(text_config=text.to_dict(), vision_config=images, **common)
    return Gemma3ForConditionalGeneration(sees)


KINDS = ("sliding_attention", "sliding_attention", "full_attention")


def make_gemma4(
    common: dict[str, Any],
    window: int | None,
    *,
    keys_are_values: bool,
    experts: tuple[int, int, int] | None = None,
    alone: bool = False,
) -> Any:
    """The model of keys that all families have. Every third layer is full, with heads of twice the
    size; where keys are values it has half as many KV heads. Scalars of layers are not 1.

    `experts`: how many there are, how many a row chooses, and the width of the MLP beside them.
    """
    layers, size, theta = (
        common["num_hidden_layers"],
        common["head_dim"],
        common["rope_parameters"]["rope_theta"],
    )
    text = common | {
        "attention_k_eq_v": keys_are_values,
        "final_logit_softcapping": 12.0,
        "global_head_dim": 2 * size,
        "hidden_size_per_layer_input": 0,
        "layer_types": [KINDS[i % 3] if i + 1 < layers else KINDS[2] for i in range(layers)],
        "num_global_key_value_heads": max(1, common["num_key_value_heads"] // 2),
        "pad_token_id": 0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": theta,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": theta / 100},
        },
        "sliding_window": window,
        "use_bidirectional_attention": "vision",
    }
    if experts is not None:
        text["moe_intermediate_size"], text["enable_moe_block"] = text["intermediate_size"], True
        keys = ("num_experts", "top_k_experts", "intermediate_size")
        text |= dict(zip(keys, experts, strict=True))
    tied = common["tie_word_embeddings"]
    model: Any = Gemma4ForConditionalGeneration(
        Gemma4Config(text_config=text, vision_config=GEMMA_VISION, tie_word_embeddings=tied)
    )
    if alone:
        model = Gemma4ForCausalLM(Gemma4TextConfig(**text))
    with torch.no_grad():
        for index, layer in enumerate(model.get_decoder().layers):
            layer.layer_scalar.fill_(0.75 + 0.125 * (index % 4))
    return model


def publish_gemma4(folder: Path, config: dict[str, Any], dtype: str) -> None:
    """The keys that published configs have of full layers: transformers 5 writes others."""
    text = config["text_config"]
    full = text.pop("per_layer_config", {}).get(str(text["num_hidden_layers"] - 1), {})
    text["global_head_dim"] = full["head_dim"]
    if text["attention_k_eq_v"]:
        text["num_global_key_value_heads"] = full["num_key_value_heads"]
    text["dtype"] = config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


WIDE = ("A_log", "linear_attn.norm.weight")
"""What published checkpoints keep in float32."""
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}


DENSE = (Qwen3_5TextConfig, Qwen3_5ForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration)
MIXTURE = (
    Qwen3_5MoeTextConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)


def make_hybrid(
    common: dict[str, Any],
    linear: Sequence[int],
    *,
    vision: bool,
    experts: tuple[int, int, int] | None = None,
) -> Any:
    """The model of keys that all families have, with the RoPE of a quarter of each head.

    `experts`: how many there are, how many a row chooses, and the width of the one that all share.
    """
    key_heads, value_heads, size = linear
    rope = common["rope_parameters"] | {
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, max(0, common["head_dim"] // 8 - 2)],
        "mrope_interleaved": True,
    }
    text = common | {
        "rope_parameters": rope,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
    }
    if experts is not None:
        text["moe_intermediate_size"] = text.pop("intermediate_size")
        keys = ("num_experts", "num_experts_per_tok", "shared_expert_intermediate_size")
        text |= dict(zip(keys, experts, strict=True))
    text_config, text_model, whole_config, whole_model = DENSE if experts is None else MIXTURE
    if not vision:
        return text_model(text_config(**text))
    sees = VISION | {"out_hidden_size": common["hidden_size"], "num_position_embeddings": 16}
    tied = common["tie_word_embeddings"]
    return whole_model(whole_config(text_config=text, vision_config=sees, tie_word_embeddings=tied))


def publish_hybrid(
    folder: Path, config: dict[str, Any], dtype: str, generator: torch.Generator
) -> None:
    """Some weights in float32 and an MTP layer beside them, as published; keys of its config."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith(WIDE):
                wide = torch.rand(tensor.shape, generator=generator) * 1e-4 + tensor.float()
                tensors[name] = wide
        save_file(tensors, path, metadata={"format": "pt"})
    if not (folder / "model.safetensors.index.json").exists():
        tensors = load_file(folder / "model.safetensors")
        tensors["mtp.fc.weight"] = torch.zeros(4, 8, dtype=getattr(torch, dtype))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = config.get("text_config", config)
    text |= {"full_attention_interval": 4, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    text["mtp_num_hidden_layers"] = 1
    text["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

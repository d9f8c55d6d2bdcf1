"""Qwen3.5 in its published layout: tiny, random, and what beside the text model lies with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

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

"""Gemma 4 in its published layout: tiny, random, in a model that sees, whose tower lies beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 16,
}
KINDS = ("sliding_attention", "sliding_attention", "full_attention")


def make_gemma4(
    common: dict[str, Any],
    window: int | None,
    *,
    keys_are_values: bool,
    experts: tuple[int, int, int] | None = None,
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
        Gemma4Config(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    )
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

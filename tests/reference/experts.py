"""Tiny random mixtures of experts: gpt-oss and Qwen3-MoE as transformers has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from dflash_trt.quantization.codecs import quantize_mxfp4

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

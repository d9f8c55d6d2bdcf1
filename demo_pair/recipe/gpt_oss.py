"""A gpt-oss target at demo size: sinks, windows, YaRN, experts that end as native MXFP4."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from demo_pair.recipe.recipe_settings import TrainingRecipe
from dflash_trt.quantization.codecs import Float32, dequantize_mxfp4, quantize_mxfp4

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")

# What gpt-oss checkpoints say of themselves; loaders find the format by `quant_method`.
QUANTIZATION_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def build_gpt_oss(recipe: TrainingRecipe, layers: int) -> Any:
    """A fresh target with `layers` layers, alternately sliding and full attention.

    The head starts as the embedding's copy, as where they are tied: what is copied from the
    prompt is found sooner. Experts' outputs start small, as depth asks.
    """
    experts = recipe.target.experts
    assert experts is not None
    config = transformers.GptOssConfig(
        **recipe.target_fields(layers),
        num_local_experts=experts.experts,
        num_experts_per_tok=experts.chosen,
        sliding_window=recipe.target.windows[0],
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": recipe.rope_theta,
            "factor": recipe.max_length / recipe.yarn_length,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": recipe.yarn_length,
        },
        output_router_logits=True,
        router_aux_loss_coef=recipe.balance,
        attn_implementation="eager",  # type: ignore[call-arg]
    )
    model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(1 / math.sqrt(2 * layers))
            layer.mlp.experts.down_proj.mul_(1 / math.sqrt(2 * layers))
    return model


def round_experts(model: Any) -> None:
    """Rounds every expert of a gpt-oss to MXFP4 values and freezes it; the tensors stay float32."""
    with torch.no_grad():
        for layer in model.model.layers:
            for name in EXPERT_WEIGHTS:
                weight = getattr(layer.mlp.experts, name)
                rounded = dequantize_mxfp4(*quantize_mxfp4(_input_last(weight)))
                weight.copy_(torch.from_numpy(rounded).transpose(-1, -2))
                weight.requires_grad = False


def save_gpt_oss(model: Any, directory: Path) -> None:
    """Writes config.json and model.safetensors with experts as `_blocks` and `_scales`.

    The experts must hold MXFP4 values (`round_experts`); everything else is written in bf16.
    """
    tensors: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if name.endswith(EXPERT_WEIGHTS):
            packed, scales = quantize_mxfp4(_input_last(value))
            blocks = packed.reshape(*scales.shape, -1)
            tensors[f"{name}_blocks"] = torch.from_numpy(blocks)
            tensors[f"{name}_scales"] = torch.from_numpy(scales)
        else:
            tensors[name] = value.to(torch.bfloat16).contiguous()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads(model.config.to_json_string())
    config |= {
        "architectures": ["GptOssForCausalLM"],
        "dtype": "bfloat16",
        "use_cache": True,
        "output_router_logits": False,
        "quantization_config": QUANTIZATION_CONFIG,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _input_last(weight: Any) -> Float32:
    """An expert weight [E, in, out] as the float32 array [E, out, in] that is quantised."""
    rows: Float32 = weight.detach().transpose(-1, -2).contiguous().numpy()
    return rows

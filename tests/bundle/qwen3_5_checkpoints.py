"""Qwen3.5 and 3.6 with their DFlash drafts in true shapes, as sparse files that take no disk.

Config, names, types and shapes are the published checkpoints', a part of the vision tower and of
the MTP layer included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_trt.building.synthetic.checkpoint_writer import Tensors
from dflash_trt.building.synthetic.qwen3 import (
    attention_shapes,
    config_sizes,
    draft_config,
    write_both,
)
from dflash_trt.deploy.planning.known_pairs import PairShape, find_pair
from dflash_trt.models.sizes import RecurrentSizes

SHARD_BYTES = 4_600_000_000
PREFIX = "model.language_model"
_EOS, _THETA = 248_044, 10_000_000


def write_qwen3_5(folder: Path, name: str) -> int:
    """Writes the public pair `name`: `folder`/target (sharded) and draft; returns their bytes."""
    pair = find_pair(name)
    target = _config(pair), _tensors(pair)
    return write_both(folder, target, pair, _draft_config(pair), shard_bytes=SHARD_BYTES)


def _draft_config(pair: PairShape) -> dict[str, Any]:
    """As published: those that slide have their block and their RoPE in newer places."""
    config = draft_config(pair, pair.draft.mask_token_id) | {"rope_theta": _THETA}
    config["dflash_config"]["target_layer_ids"] = list(pair.draft.target_layer_ids)
    if pair.draft.has_windows:
        config["dflash_config"]["block_size"] = config.pop("block_size")
        config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
    return config


def _recurrent(pair: PairShape) -> RecurrentSizes:
    return next(one.recurrent for one in pair.target.sizes.layers if one.recurrent is not None)


def _config(pair: PairShape) -> dict[str, Any]:
    one = _recurrent(pair)
    kinds = [
        "full_attention" if layer.recurrent is None else "linear_attention"
        for layer in pair.target.sizes.layers
    ]
    kind, architecture = "qwen3_5", "Qwen3_5ForConditionalGeneration"
    text = config_sizes(pair.target)
    if (experts := pair.target.experts) is not None:
        kind, architecture = "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"
        text["moe_intermediate_size"] = text.pop("intermediate_size")
        text |= {
            "mlp_only_layers": [],
            "num_experts": experts.experts,
            "num_experts_per_tok": experts.chosen,
            "shared_expert_intermediate_size": experts.shared,
        }
    text |= {
        "attention_bias": False,
        "attn_output_gate": True,
        "eos_token_id": _EOS,
        "full_attention_interval": 4,
        "layer_types": kinds,
        "linear_conv_kernel_dim": one.kernel,
        "linear_key_head_dim": one.head_dim,
        "linear_num_key_heads": one.key_heads,
        "linear_num_value_heads": one.value_heads,
        "linear_value_head_dim": one.head_dim,
        "mamba_ssm_dtype": "float32",
        "model_type": f"{kind}_text",
        "mtp_num_hidden_layers": 1,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": _THETA,
            "rope_type": "default",
        },
    }
    return {
        "architectures": [architecture],
        "model_type": kind,
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": kind},
    }


def _tensors(pair: PairShape) -> Tensors:
    model, one = pair.target, _recurrent(pair)
    hidden, values = model.sizes.hidden_size, one.value_elements
    head = model.sizes.layer.head_dim
    common: Tensors = {
        "input_layernorm.weight": ("BF16", (hidden,)),
        "post_attention_layernorm.weight": ("BF16", (hidden,)),
        **_mlp(pair),
    }
    full: Tensors = {
        f"{name}.weight": ("BF16", shape) for name, shape in attention_shapes(model).items()
    }
    full["self_attn.q_proj.weight"] = ("BF16", (model.sizes.layer.query_elements, hidden))
    full |= {f"self_attn.{name}_norm.weight": ("BF16", (head,)) for name in "qk"}
    linear: Tensors = {
        "linear_attn.in_proj_qkv.weight": ("BF16", (one.channels, hidden)),
        "linear_attn.in_proj_z.weight": ("BF16", (values, hidden)),
        "linear_attn.in_proj_b.weight": ("BF16", (one.value_heads, hidden)),
        "linear_attn.in_proj_a.weight": ("BF16", (one.value_heads, hidden)),
        "linear_attn.conv1d.weight": ("BF16", (one.channels, 1, one.kernel)),
        "linear_attn.A_log": ("F32", (one.value_heads,)),
        "linear_attn.dt_bias": ("BF16", (one.value_heads,)),
        "linear_attn.norm.weight": ("F32", (one.head_dim,)),
        "linear_attn.out_proj.weight": ("BF16", (hidden, values)),
    }
    tensors: Tensors = {f"{PREFIX}.embed_tokens.weight": ("BF16", (model.vocab_size, hidden))}
    for number, layer in enumerate(model.sizes.layers):
        own = common | (full if layer.recurrent is None else linear)
        tensors |= {f"{PREFIX}.layers.{number}.{name}": stored for name, stored in own.items()}
    tensors[f"{PREFIX}.norm.weight"] = ("BF16", (hidden,))
    tensors["lm_head.weight"] = ("BF16", (model.vocab_size, hidden))
    tensors["mtp.fc.weight"] = ("BF16", (hidden, 2 * hidden))
    tensors["model.visual.pos_embed.weight"] = ("BF16", (2304, 1152))
    return tensors


def _mlp(pair: PairShape) -> Tensors:
    """A layer's MLP, or its experts as published: two tensors, beside the one that all share."""
    sizes, experts = pair.target.sizes, pair.target.experts
    hidden = sizes.hidden_size
    if experts is None:
        return _gated("mlp", sizes.intermediate_size, hidden)
    count, ffn = experts.experts, experts.intermediate_size
    return {
        "mlp.gate.weight": ("BF16", (count, hidden)),
        "mlp.experts.gate_up_proj": ("BF16", (count, 2 * ffn, hidden)),
        "mlp.experts.down_proj": ("BF16", (count, hidden, ffn)),
        **_gated("mlp.shared_expert", experts.shared, hidden),
        "mlp.shared_expert_gate.weight": ("BF16", (1, hidden)),
    }


def _gated(name: str, ffn: int, hidden: int) -> Tensors:
    return {
        f"{name}.gate_proj.weight": ("BF16", (ffn, hidden)),
        f"{name}.up_proj.weight": ("BF16", (ffn, hidden)),
        f"{name}.down_proj.weight": ("BF16", (hidden, ffn)),
    }

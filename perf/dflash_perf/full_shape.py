"""gpt-oss-120b and its DFlash draft in their true shapes, as files that take no disk.

Config, names, types and shapes are the published checkpoints'; the data are holes. Building a
bundle reads none of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_perf.synthetic import Tensors, encode_header

SHARD_BYTES = 4_600_000_000
EOS_TOKEN_IDS = [200_002, 199_999, 200_012]
TAPS = [1, 9, 17, 25, 33]

TARGET: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200_002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131_072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "output_router_logits": False,
    "pad_token_id": 199_999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150_000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201_088,
}

DRAFT: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "block_size": 10,
    "dflash_config": {"mask_token_id": 200_000, "target_layer_ids": TAPS},
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 7680,
    "layer_types": ["full_attention"] * 8,
    "max_position_embeddings": 131_072,
    "model_type": "qwen3",
    "num_attention_heads": 64,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 150_000,
    "tie_word_embeddings": False,
    "vocab_size": 201_088,
}


def write_gpt_oss_120b(folder: Path) -> int:
    """Writes `folder`/target (shards and their index) and `folder`/draft; the bytes of weights."""
    size = _write_shards(folder / "target", TARGET, _target_tensors())
    generation = {"eos_token_id": EOS_TOKEN_IDS, "pad_token_id": 199_999, "do_sample": True}
    (folder / "target" / "generation_config.json").write_text(json.dumps(generation))
    return size + _write_shards(folder / "draft", DRAFT, _draft_tensors())


def expert_tensors(experts: int, prefix: str) -> Tensors:
    """The MXFP4 tensors of one layer's `experts`, whose names begin with `prefix`."""
    hidden, ffn = TARGET["hidden_size"], TARGET["intermediate_size"]
    return {
        f"{prefix}.gate_up_proj_blocks": ("U8", (experts, 2 * ffn, hidden // 32, 16)),
        f"{prefix}.gate_up_proj_scales": ("U8", (experts, 2 * ffn, hidden // 32)),
        f"{prefix}.gate_up_proj_bias": ("BF16", (experts, 2 * ffn)),
        f"{prefix}.down_proj_blocks": ("U8", (experts, hidden, ffn // 32, 16)),
        f"{prefix}.down_proj_scales": ("U8", (experts, hidden, ffn // 32)),
        f"{prefix}.down_proj_bias": ("BF16", (experts, hidden)),
    }


def _target_tensors() -> Tensors:
    hidden, experts = TARGET["hidden_size"], TARGET["num_local_experts"]
    vocab = (TARGET["vocab_size"], hidden)
    tensors: Tensors = {"model.embed_tokens.weight": ("BF16", vocab)}
    for layer in range(TARGET["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= expert_tensors(experts, f"{prefix}.mlp.experts")
        shapes: dict[str, tuple[int, ...]] = {
            "mlp.router.weight": (experts, hidden),
            "mlp.router.bias": (experts,),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.sinks": (TARGET["num_attention_heads"],),
        }
        for name, shape in _attention(TARGET).items():
            shapes |= {f"self_attn.{name}.weight": shape, f"self_attn.{name}.bias": shape[:1]}
        tensors |= {f"{prefix}.{name}": ("BF16", shape) for name, shape in shapes.items()}
    tensors["model.norm.weight"] = ("BF16", (hidden,))
    tensors["lm_head.weight"] = ("BF16", vocab)
    return tensors


def _draft_tensors() -> Tensors:
    hidden, ffn, head = DRAFT["hidden_size"], DRAFT["intermediate_size"], (DRAFT["head_dim"],)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, hidden * len(TAPS)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(DRAFT["num_hidden_layers"]):
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_norm": head,
            "self_attn.k_norm": head,
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        parts |= {f"self_attn.{name}": shape for name, shape in _attention(DRAFT).items()}
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }


def _write_shards(folder: Path, config: dict[str, Any], tensors: Tensors) -> int:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    shards: list[Tensors] = [{}]
    for name, tensor in tensors.items():
        if encode_header(shards[-1] | {name: tensor})[1] > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    total, places = 0, dict[str, str]()
    for number, shard in enumerate(shards):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else file
        header, size = encode_header(shard)
        with (folder / file).open("wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + size)
        total += size
        places |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total

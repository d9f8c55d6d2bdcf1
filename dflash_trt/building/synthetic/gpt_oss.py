"""gpt-oss targets of any size with their DFlash drafts, and gpt-oss-120b in its true shapes.

Names, types and shapes are the published checkpoints', and what is read of their configs. Building
graphs reads no weights, so the true shapes are sparse files that take no disk.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_trt.building.synthetic.checkpoint_writer import Shapes, Tensors
from dflash_trt.building.synthetic.qwen3 import (
    attention_shapes,
    config_sizes,
    draft_config,
    write_both,
)
from dflash_trt.deploy.planning.known_pairs import PairShape

EOS_TOKEN_IDS = [200_002, 199_999, 200_012]
_PAD, _MASK = 199_999, 200_000
_ROPE_THETA = 150_000
_QUANTIZATION = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


def write_gpt_oss(
    folder: Path, pair: PairShape, *, random: bool, has_kv_scales: bool = False
) -> int:
    """Writes a gpt-oss pair, as `write_both` does."""
    config = draft_config(pair, min(_MASK, pair.target.vocab_size - 1)) | {
        "rope_theta": _ROPE_THETA,
        "attention_bias": False,
    }
    size = write_both(
        folder,
        (_target_config(pair), _target_tensors(pair)),
        pair,
        config,
        random=random,
        has_kv_scales=has_kv_scales,
    )
    if _has_special_tokens(pair):
        generation = {"eos_token_id": EOS_TOKEN_IDS, "pad_token_id": _PAD, "do_sample": True}
        (folder / "target" / "generation_config.json").write_text(json.dumps(generation))
    return size


def _has_special_tokens(pair: PairShape) -> bool:
    """Whether the vocabulary holds gpt-oss's special tokens; a tiny one has none."""
    return pair.target.vocab_size > max(EOS_TOKEN_IDS)


def _target_config(pair: PairShape) -> dict[str, Any]:
    model = pair.target
    assert model.experts is not None
    kinds = ["full_attention" if w is None else "sliding_attention" for w in model.sizes.windows]
    return config_sizes(model) | {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "eos_token_id": EOS_TOKEN_IDS[0] if _has_special_tokens(pair) else None,
        "experts_per_token": model.experts.chosen,
        "layer_types": kinds,
        "model_type": "gpt_oss",
        "num_experts_per_tok": model.experts.chosen,
        "num_local_experts": model.experts.experts,
        "pad_token_id": _PAD if _has_special_tokens(pair) else None,
        "quantization_config": _QUANTIZATION,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": _ROPE_THETA,
        "sliding_window": next(window for window in model.sizes.windows if window),
        "swiglu_limit": 7.0,
    }


def _target_tensors(pair: PairShape) -> Tensors:
    model = pair.target
    assert model.experts is not None
    hidden, experts = model.sizes.hidden_size, model.experts.experts
    vocab = model.vocab_size, hidden
    layer: Shapes = {
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.sinks": (model.sizes.layer.heads,),
    }
    for name, shape in attention_shapes(model).items():
        layer |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    tensors: Tensors = {"model.embed_tokens.weight": ("BF16", vocab)}
    for number in range(len(model.sizes.layers)):
        prefix = f"model.layers.{number}"
        tensors |= _expert_tensors(pair, experts, f"{prefix}.mlp.experts")
        tensors |= {f"{prefix}.{name}": ("BF16", shape) for name, shape in layer.items()}
    tensors["model.norm.weight"] = ("BF16", (hidden,))
    tensors["lm_head.weight"] = ("BF16", vocab)
    return tensors


def _expert_tensors(pair: PairShape, experts: int, prefix: str) -> Tensors:
    """The MXFP4 tensors of one layer's `experts`, whose names begin with `prefix`."""
    hidden, ffn = pair.target.sizes.hidden_size, pair.target.sizes.mlp_size
    return {
        f"{prefix}.gate_up_proj_blocks": ("U8", (experts, 2 * ffn, hidden // 32, 16)),
        f"{prefix}.gate_up_proj_scales": ("U8", (experts, 2 * ffn, hidden // 32)),
        f"{prefix}.gate_up_proj_bias": ("BF16", (experts, 2 * ffn)),
        f"{prefix}.down_proj_blocks": ("U8", (experts, hidden, ffn // 32, 16)),
        f"{prefix}.down_proj_scales": ("U8", (experts, hidden, ffn // 32)),
        f"{prefix}.down_proj_bias": ("BF16", (experts, hidden)),
    }

"""Gemma 4 with DFlash drafts in true shapes, as sparse files that take no disk.

Config, names, types and shapes are the published checkpoints', a part of the vision tower included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_trt.building.synthetic.checkpoint_writer import Tensors
from dflash_trt.building.synthetic.qwen3 import config_sizes, draft_config, write_both
from dflash_trt.deploy.planning.known_pairs import PairShape, find_pair
from dflash_trt.models.sizes import ExpertSizes, LayerSizes

SHARD_BYTES = 4_900_000_000
PREFIX = "model.language_model"
EOS_TOKEN_IDS = [1, 106]
_CAP = 30.0
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_EXPERT_NORMS = (
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
    "pre_feedforward_layernorm_2",
)


def write_gemma4(folder: Path, name: str) -> int:
    """Writes the public pair `name`: `folder`/target (sharded) and draft; returns their bytes."""
    pair = find_pair(name)
    config = draft_config(pair, pair.draft.mask_token_id) | {
        "final_logit_softcapping": _CAP,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    }
    config["dflash_config"]["target_layer_ids"] = list(pair.draft.target_layer_ids)
    target = _config(pair), _tensors(pair)
    return write_both(folder, target, pair, config, shard_bytes=SHARD_BYTES)


def _config(pair: PairShape) -> dict[str, Any]:
    sizes = pair.target.sizes
    full = sizes.full_layer
    text = config_sizes(pair.target) | {
        "attention_bias": False,
        "attention_k_eq_v": full.keys_are_values,
        "enable_moe_block": False,
        "eos_token_id": EOS_TOKEN_IDS[0],
        "final_logit_softcapping": _CAP,
        "global_head_dim": full.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "layer_types": [
            "full_attention" if w is None else "sliding_attention" for w in sizes.windows
        ],
        "model_type": "gemma4_text",
        "num_experts": None,
        "num_global_key_value_heads": full.kv_heads,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
        },
        "sliding_window": sizes.layers[0].window,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
    }
    del text["hidden_act"]
    if (experts := sizes.experts) is not None:
        text |= {
            "enable_moe_block": True,
            "intermediate_size": experts.shared,
            "moe_intermediate_size": experts.intermediate_size,
            "num_experts": experts.experts,
            "top_k_experts": experts.chosen,
        }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "eos_token_id": EOS_TOKEN_IDS,
        "model_type": "gemma4",
        "text_config": text,
        "tie_word_embeddings": True,
        "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision"},
    }


def _tensors(pair: PairShape) -> Tensors:
    model = pair.target
    hidden, ffn, experts = model.sizes.hidden_size, model.sizes.mlp_size, model.experts
    if experts is not None:
        ffn = experts.shared
    shapes: dict[str, tuple[int, ...]] = {
        f"{PREFIX}.embed_tokens.weight": (model.vocab_size, hidden),
        f"{PREFIX}.norm.weight": (hidden,),
        "model.vision_tower.patch_embedder.input_proj.weight": (1152, 768),
        "model.embed_vision.embedding_projection.weight": (hidden, 1152),
    }
    common: dict[str, tuple[int, ...]] = {
        **{f"{norm}.weight": (hidden,) for norm in _NORMS},
        "layer_scalar": (1,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if experts is not None:
        common |= _mixture(hidden, experts)
    for number, layer in enumerate(model.sizes.layers):
        own = common | _attention(hidden, layer)
        shapes |= {f"{PREFIX}.layers.{number}.{name}": shape for name, shape in own.items()}
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def _mixture(hidden: int, experts: ExpertSizes) -> dict[str, tuple[int, ...]]:
    count, width = experts.experts, experts.intermediate_size
    return {
        **{f"{norm}.weight": (hidden,) for norm in _EXPERT_NORMS},
        "experts.down_proj": (count, hidden, width),
        "experts.gate_up_proj": (count, 2 * width, hidden),
        "router.per_expert_scale": (count,),
        "router.proj.weight": (count, hidden),
        "router.scale": (hidden,),
    }


def _attention(hidden: int, layer: LayerSizes) -> dict[str, tuple[int, ...]]:
    queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    linears: dict[str, tuple[int, ...]] = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "q_norm": (layer.head_dim,),
        "k_norm": (layer.head_dim,),
    }
    if not layer.keys_are_values:
        linears["v_proj"] = (keys, hidden)
    return {f"self_attn.{name}.weight": shape for name, shape in linears.items()}

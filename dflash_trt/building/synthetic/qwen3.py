"""Qwen3 targets of any size with their DFlash drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_trt.building.synthetic.checkpoint_writer import (
    STATES_KV_SCALES,
    Shapes,
    Tensors,
    kv_scales,
    write_checkpoint,
)
from dflash_trt.deploy.planning.known_pairs import PairShape
from dflash_trt.models import dflash2
from dflash_trt.models.sizes import DraftShape, ModelShape, TargetShape

_PLAIN = {"model_type": "qwen3", "rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
LAYER_PREFIX = {"target": "model.layers", "draft": "layers"}


def write_both(
    folder: Path,
    target: tuple[dict[str, Any], Tensors],
    pair: PairShape,
    draft: dict[str, Any],
    *,
    random: bool,
    has_kv_scales: bool,
) -> int:
    """Writes `folder`/target, of a config and tensors, and `folder`/draft, of a config and the
    tensors of `pair`'s draft; returns the bytes of weights.

    Args:
        random: False leaves the files sparse.
        has_kv_scales: whether both state the scales of an FP8 KV cache.
    """
    drafted = {name: ("BF16", shape) for name, shape in draft_shapes(pair.draft).items()}
    size = 0
    for name, (config, tensors), model in (
        ("target", target, pair.target),
        ("draft", (draft, drafted), pair.draft),
    ):
        if has_kv_scales:
            config = STATES_KV_SCALES | config  # one that is quantised says how already
            tensors = tensors | kv_scales(LAYER_PREFIX[name], len(model.sizes.layers))
        size += write_checkpoint(folder / name, config, tensors, random=random)
    return size


def write_pair(folder: Path, pair: PairShape, *, random: bool, has_kv_scales: bool = False) -> int:
    """Writes a Qwen3 pair in bf16, as `write_both` does."""
    target = pair.target
    vocab = (target.vocab_size, target.sizes.hidden_size)
    shapes: Shapes = {
        "model.embed_tokens.weight": vocab,
        "model.norm.weight": vocab[1:],
        "lm_head.weight": vocab,
    } | _layer_shapes(LAYER_PREFIX["target"], target)
    config = _PLAIN | {"architectures": ["Qwen3ForCausalLM"]} | config_sizes(target)
    return write_both(
        folder,
        (config, {name: ("BF16", shape) for name, shape in shapes.items()}),
        pair,
        draft_config(pair, target.vocab_size - 1),
        random=random,
        has_kv_scales=has_kv_scales,
    )


def config_sizes(model: TargetShape | DraftShape) -> dict[str, Any]:
    """The sizes of a model under the keys that every family's config.json has."""
    return {
        "num_hidden_layers": len(model.sizes.layers),
        "hidden_size": model.sizes.hidden_size,
        "num_attention_heads": model.sizes.layer.heads,
        "num_key_value_heads": model.sizes.layer.kv_heads,
        "head_dim": model.sizes.layer.head_dim,
        "intermediate_size": model.sizes.mlp_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def draft_config(pair: PairShape, mask_token_id: int) -> dict[str, Any]:
    """A draft's config.json, with tapped layers spread evenly over the target's."""
    layers, taps = len(pair.target.sizes.layers), len(pair.draft.target_layer_ids)
    ids = [1 + round(tap * (layers - 4) / (taps - 1)) for tap in range(taps)]
    inner: dict[str, Any] = {"mask_token_id": mask_token_id, "target_layer_ids": ids}
    if (own := pair.draft.dflash2) is not None:
        inner |= dict(
            zip(dflash2.KEYS, (dflash2.TAPS, own.group, own.rank, own.top_k), strict=True)
        )
    return (
        _PLAIN
        | {
            "architectures": ["DFlashDraftModel" if own is None else dflash2.ARCHITECTURE],
            "num_target_layers": layers,
            "block_size": pair.draft.block_size,
            "dflash_config": inner,
        }
        | config_sizes(pair.draft)
        | window_keys(pair.draft)
        | ({} if own is None else {"is_causal": False})
    )


def window_keys(model: ModelShape) -> dict[str, Any]:
    """Which layers of a model slide, under the keys of config.json; nothing where none does."""
    windows = model.sizes.windows
    if not any(windows):
        return {}
    return {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windows],
        "sliding_window": next(one for one in windows if one),
        "use_sliding_window": True,
    }


def draft_shapes(draft: DraftShape) -> Shapes:
    """The draft's tensors: name → shape."""
    hidden = draft.sizes.hidden_size
    shapes: Shapes = {
        "fc.weight": (hidden, hidden * len(draft.target_layer_ids)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    } | _layer_shapes(LAYER_PREFIX["draft"], draft)
    if draft.dflash2 is not None:
        layers = len(draft.sizes.layers)
        shapes |= draft.dflash2.shapes(hidden, draft.vocab_size or 0, layers)
    return shapes


def attention_shapes(model: ModelShape) -> Shapes:
    """The shapes [out,in] of one layer's attention weights, by name."""
    hidden, layer = model.sizes.hidden_size, model.sizes.layer
    queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
    }


def _layer_shapes(prefix: str, model: ModelShape) -> Shapes:
    hidden, mlp, head_dim = (
        model.sizes.hidden_size,
        model.sizes.mlp_size,
        model.sizes.layer.head_dim,
    )
    layer = attention_shapes(model) | {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    return {
        f"{prefix}.{number}.{name}.weight": shape
        for number in range(len(model.sizes.layers))
        for name, shape in layer.items()
    }

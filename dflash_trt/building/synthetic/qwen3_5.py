"""Dense Qwen3.5 targets of any size with their drafts: names, config and shapes as published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_trt.building.synthetic.checkpoint_writer import Tensors
from dflash_trt.building.synthetic.qwen3 import config_sizes, draft_config, write_both
from dflash_trt.deploy.planning.known_pairs import PairShape
from dflash_trt.models.families import QWEN3_5, target_rules
from dflash_trt.models.layers import FULL, LINEAR
from dflash_trt.models.mtp import OWN_SYMBOLS, layer_rules
from dflash_trt.models.name_map import expand, size_of
from dflash_trt.models.sizes import TargetShape

_ROPE = {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}


def write_hybrid(folder: Path, pair: PairShape, *, random: bool) -> int:
    """Writes a Qwen3.5 pair in bf16, as `write_both` does, with its MTP layer, without vision."""
    target, taps = pair.target, list(pair.draft.target_layer_ids)
    config: dict[str, Any] = {
        "architectures": [QWEN3_5.architecture],
        "text_config": _text_config(target),
        "tie_word_embeddings": target.tie_word_embeddings,
    }
    draft = draft_config(pair, pair.draft.mask_token_id) | {"rope_theta": _ROPE["rope_theta"]}
    draft["dflash_config"] |= {"target_layer_ids": taps}
    tensors = _tensors(target)
    return write_both(folder, (config, tensors), pair, draft, random=random, has_kv_scales=False)


def _text_config(target: TargetShape) -> dict[str, Any]:
    layers = target.sizes.layers
    (one,) = {layer.recurrent for layer in layers if layer.recurrent is not None}
    return config_sizes(target) | {
        "layer_types": [FULL if layer.recurrent is None else LINEAR for layer in layers],
        "linear_num_key_heads": one.key_heads,
        "linear_num_value_heads": one.value_heads,
        "linear_key_head_dim": one.head_dim,
        "linear_value_head_dim": one.head_dim,
        "linear_conv_kernel_dim": one.kernel,
        "mtp_num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _ROPE,
    }


def _tensors(target: TargetShape) -> Tensors:
    kinds: dict[str, list[int]] = {"i": [], "linear": [], "full": []}
    for index, layer in enumerate(target.sizes.layers):
        kinds["i"].append(index)
        kinds["full" if layer.recurrent is None else "linear"].append(index)
    rules = target_rules(QWEN3_5, attention_bias=False, tied=target.tie_word_embeddings)
    symbols = target.sizes.symbols() | {"vocab": target.vocab_size} | OWN_SYMBOLS
    one = expand(layer_rules(QWEN3_5), {"i": [0], "full": [0]})
    return {
        name: ("BF16", tuple(int(size_of(term, symbols)) for term in shape))
        for name, shape in (*expand(rules, kinds).values(), *one.values())
    }

"""The pairs that the numeric tests run over: every option beside every family and storage."""

from __future__ import annotations

from itertools import product
from typing import Any

from tests.covering import exhaustive
from tests.pairs import PairFactory, TinyPair
from tests.reference.checkpoints import Family, Rope, RopeStyle, Storage

FAMILIES: tuple[Family, ...] = ("qwen3", "llama")
STORAGES: tuple[Storage, ...] = ("float32", "bfloat16", "float16")
ROPES: tuple[Rope, ...] = ("default", "llama3")
STYLES: tuple[RopeStyle, ...] = ("rope_theta", "rope_parameters")

Variant = tuple[Family, dict[str, Any], dict[str, Any]]


def _variants() -> dict[str, Variant]:
    """The whole product of family, storage and rope; the rest turns at its own pace."""
    variants: dict[str, Variant] = {}
    for index, (family, storage, rope) in enumerate(product(FAMILIES, STORAGES, ROPES)):
        tie, bias, shards = index // 2 % 2 == 0, index % 3 == 1, (1, 3)[index // 3 % 2]
        style = STYLES[index // 5 % 2]
        kv_heads = (2, 4, 1)[index % 3]
        target: dict[str, Any] = {
            "dtype": storage,
            "rope": rope,
            "rope_style": style,
            "tie": tie,
            "attention_bias": bias,
            "shards": shards,
            "kv_heads": kv_heads,
            "vocab": 192,
            "seed": index,
        }
        draft: dict[str, Any] = {
            # Its own storage, and rope equal to the target's (shared tables) or not.
            "dtype": STORAGES[(index + index // 4) % 3],
            "rope": rope if index % 4 < 2 else "default",
            "rope_style": STYLES[index // 3 % 2],
            "target_layer_ids": (None, [0, 5, 2], [4], [3, 3])[index % 4],
            "block_size_place": ("top", "dflash_config")[index % 2],
            "num_layers": 1 + index % 3,
            "seed": 100 + index,
        }
        if index % 5 == 0:
            draft |= {"heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate": 40}
        words = [family, storage, f"{rope}_rope", style, f"kv{kv_heads}"]
        words += ["tied"] * tie + ["bias"] * bias + ["sharded"] * (shards > 1)
        variants["-".join(words)] = (family, target, draft)
    return variants


MIXTURES: dict[str, Variant] = {
    "gpt_oss-bfloat16-yarn": (
        "gpt_oss",
        {"dtype": "bfloat16", "rope": "yarn", "rope_style": "rope_theta", "vocab": 192},
        {"dtype": "bfloat16", "rope_theta": 150_000.0, "target_layer_ids": [1, 4, 5]},
    ),
    "gpt_oss-mxfp4-yarn-one_expert_a_row": (
        "gpt_oss",
        {"mxfp4": True, "rope": "yarn", "vocab": 192, "chosen": 1, "kv_heads": 4},
        {"target_layer_ids": [0, 5]},
    ),
    "qwen3_moe-float32": (
        "qwen3_moe",
        {"vocab": 192, "intermediate": 40},
        {"target_layer_ids": [5, 2]},
    ),
    "gemma4_moe-float32-tied": (
        "gemma4_moe",
        {"vocab": 192, "tie": True, "intermediate": 48, "shared": 80},
        {"target_layer_ids": [2, 5], "intermediate": 96},
    ),
    "qwen3_moe-float16-sharded-all_experts-not_normalized": (
        "qwen3_moe",
        {
            "dtype": "float16",
            "vocab": 192,
            "shards": 3,
            "experts": 4,
            "chosen": 4,
            "normalized": False,
            "rope_style": "rope_theta",
        },
        {"dtype": "float16", "heads": 2, "kv_heads": 1, "head_dim": 32},
    ),
}

WINDOWED: dict[str, Variant] = {
    "qwen2-bfloat16-upper_layers_slide-tied": (
        "qwen2",
        {"dtype": "bfloat16", "rope_style": "rope_theta", "vocab": 192, "tie": True},
        {"target_layer_ids": [0, 5]},
    ),
    "qwen2-float32-yarn-no_windows": (
        "qwen2",
        {"rope": "yarn", "vocab": 192, "window": None, "rope_theta": 1e6},
        {"target_layer_ids": [4, 2, 3]},
    ),
    "mistral-float32-every_layer_slides": (
        "mistral",
        {"vocab": 192, "shards": 3, "rope_style": "rope_theta"},
        {"target_layer_ids": [1, 5]},
    ),
    "mistral-bfloat16-wide_heads-no_windows": (
        "mistral",
        {"dtype": "bfloat16", "vocab": 192, "window": None, "head_dim": 32, "kv_heads": 1},
        {"target_layer_ids": [0, 3]},
    ),
    "gemma3-float32-tied": (
        "gemma3",
        {"vocab": 192, "tie": True},
        {"target_layer_ids": [1, 5]},
    ),
    "gemma3-bfloat16-not_tied-rope_theta": (
        "gemma3",
        {"dtype": "bfloat16", "vocab": 192, "rope_style": "rope_theta", "head_dim": 32},
        {"target_layer_ids": [0, 3], "dtype": "bfloat16", "heads": 2, "kv_heads": 1},
    ),
    "gemma4-float32-tied": (
        "gemma4",
        {"vocab": 192, "tie": True},
        {"target_layer_ids": [1, 2, 5]},
    ),
    "gemma4-bfloat16-sharded-values_of_their_own": (
        "gemma4",
        {
            "dtype": "bfloat16",
            "vocab": 192,
            "tie": True,
            "shards": 3,
            "kv_heads": 4,
            "keys_are_values": False,
        },
        {"target_layer_ids": [0, 4], "dtype": "bfloat16", "heads": 2, "kv_heads": 1},
    ),
}
"""Layers that slide, in the layouts of these families' configs, and without: tests run past 24."""

_PLAIN = _variants()
VARIANTS = _PLAIN | MIXTURES | WINDOWED
DAILY = {*list(_PLAIN)[::4], *list(MIXTURES)[1:4], *list(WINDOWED)[::2]}
NAMES = [name if name in DAILY else exhaustive(name) for name in VARIANTS]
"""Of every family one a day."""


def build(make_pair: PairFactory, name: str) -> TinyPair:
    family, target, draft = VARIANTS[name]
    return make_pair(family, target, draft)

"""The pairs that the numeric tests run over: every option beside every family and storage."""

from __future__ import annotations

from itertools import product
from typing import Any

from tests.covering import exhaustive
from tests.pairs import PairFactory, TinyPair
from tests.reference.checkpoints import Family, Rope, Storage

FAMILIES: tuple[Family, ...] = ("qwen3", "llama")
STORAGES: tuple[Storage, ...] = ("float32", "bfloat16", "float16")
ROPES: tuple[Rope, ...] = ("default", "llama3")
STYLES = ("rope_theta", "rope_parameters")
VOCAB = 192

Variant = tuple[Family, dict[str, Any], dict[str, Any]]


def _plain() -> dict[str, Variant]:
    """The whole product of family, storage and rope; the rest turns at its own pace."""
    variants: dict[str, Variant] = {}
    for index, (family, storage, rope) in enumerate(product(FAMILIES, STORAGES, ROPES)):
        target: dict[str, Any] = {
            "dtype": storage,
            "rope": rope,
            "rope_style": STYLES[index // 5 % 2],
            "tie": index // 2 % 2 == 0,
            "attention_bias": index % 3 == 1,
            "shards": (1, 3)[index // 3 % 2],
            "kv_heads": (2, 4, 1)[index % 3],
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
        variants[f"{family}-{storage}-{rope}_rope"] = (family, target, draft)
    return variants


BF16, THETA = {"dtype": "bfloat16"}, {"rope_style": "rope_theta"}
# Layers that slide are in the layouts of these families' configs; tests run past windows of 24.
OTHERS: dict[str, Variant] = {
    "gpt_oss-mxfp4-one_expert_a_row": (
        "gpt_oss",
        {"mxfp4": True, "rope": "yarn", "chosen": 1, "kv_heads": 4},
        {"target_layer_ids": [0, 5]},
    ),
    "qwen3_moe-float32": ("qwen3_moe", {"intermediate": 40}, {"target_layer_ids": [5, 2]}),
    "gemma4_moe-tied": (
        "gemma4_moe",
        {"tie": True, "intermediate": 48, "shared": 80},
        {"target_layer_ids": [2, 5], "intermediate": 96},
    ),
    "qwen2-bfloat16-tied": ("qwen2", {**BF16, **THETA, "tie": True}, {"target_layer_ids": [0, 5]}),
    "mistral-sharded": ("mistral", {"shards": 3, **THETA}, {"target_layer_ids": [1, 5]}),
    "gemma3-tied": ("gemma3", {"tie": True}, {"target_layer_ids": [1, 5]}),
    "gemma3-sees-linear": (
        "gemma3",
        {**BF16, **THETA, "vision": True, "rope": "linear"},
        {"target_layer_ids": [2, 5]},
    ),
    "gemma4-text": ("gemma4", {"alone": True}, {"target_layer_ids": [0, 5]}),
    "gemma4-tied": ("gemma4", {"tie": True}, {"target_layer_ids": [1, 2, 5]}),
}
_PLAIN = _plain()
VARIANTS = _PLAIN | OTHERS
DAILY = {*list(_PLAIN)[::4], *OTHERS}
NAMES = [name if name in DAILY else exhaustive(name) for name in VARIANTS]
"""Of every family one a day."""


def build(make_pair: PairFactory, name: str) -> TinyPair:
    family, target, draft = VARIANTS[name]
    return make_pair(family, {"vocab": VOCAB, **target}, draft)

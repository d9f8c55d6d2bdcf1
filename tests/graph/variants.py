"""The pairs that the numeric tests run over: every option beside every family and storage."""

from __future__ import annotations

from itertools import product
from typing import Any

from tests.pairs import PairFactory, TinyPair
from tests.reference.checkpoints import Family, Rope, RopeStyle, Storage

FAMILIES: tuple[Family, ...] = ("qwen3", "llama")
STORAGES: tuple[Storage, ...] = ("float32", "bfloat16", "float16")
ROPES: tuple[Rope, ...] = ("default", "llama3")
STYLES: tuple[RopeStyle, ...] = ("rope_theta", "rope_parameters")

Variant = tuple[Family, dict[str, Any], dict[str, Any]]


def _variants() -> dict[str, Variant]:
    """The whole product of family, storage, rope and style; the rest turns at its own pace."""
    variants: dict[str, Variant] = {}
    for index, (family, storage, rope, style) in enumerate(
        product(FAMILIES, STORAGES, ROPES, STYLES)
    ):
        tie, bias, shards = bool(index % 2), index % 3 == 1, (1, 3)[index // 2 % 2]
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


VARIANTS = _variants()


def build(make_pair: PairFactory, name: str) -> TinyPair:
    family, target, draft = VARIANTS[name]
    return make_pair(family, target, draft)

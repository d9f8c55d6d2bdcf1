"""Random pairs with the heads and caches that public pairs have, small enough to build in seconds.

PAIRS meets each value of its columns in pages, in linear caches, and without plugins, as a test
checks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dflash_trt.building.synthetic.gpt_oss import write_gpt_oss
from dflash_trt.building.synthetic.qwen3 import write_pair
from dflash_trt.deploy.planning.known_pairs import PairShape
from dflash_trt.graph.form import CacheDtype
from dflash_trt.hardware.kernels import ONE_LAUNCH
from dflash_trt.models.build_config import BuildConfig
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import Pair, check_pair
from dflash_trt.models.sizes import (
    DecoderSizes,
    DraftShape,
    ExpertSizes,
    LayerSizes,
    TargetShape,
)
from dflash_trt.models.target import read_target

Attention = Literal["full", "sinks", "window"]
"""Qwen3's; gpt-oss's, with sinks and a window in every other layer; Qwen3's and a draft with one
sliding layer."""

HIDDEN, MLP, VOCABULARY = 256, 192, 1000
LAYERS, DRAFT_LAYERS, TAPS = 5, 2, (1, 2)
# All are chosen: a choice between experts may fall otherwise in another precision, and then nothing
# could be compared.
EXPERTS = 4
WINDOW = 40
MAX_BATCH, PREFILL_CHUNK = 4, 96
# Attention in one launch, or in several splits and their merge.
SHORT, LONG = ONE_LAUNCH // 4, ONE_LAUNCH + 100
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class RandomPair:
    """One row: what the pair's attention and caches are like.

    Args:
        group: query heads per KV head.
        kv_heads: fewer for a large group, so that all rows cost about the same.
        is_paged: pages of PAGE_SIZE positions; else linear caches.
        max_seq_len: positions of a sequence.
    """

    group: int
    attention: Attention
    head_dim: int
    is_paged: bool
    cache_dtype: CacheDtype
    kv_heads: int
    block_size: int
    max_seq_len: int

    @property
    def name(self) -> str:
        caches = "paged" if self.is_paged else "linear"
        codes = " FP8" if self.cache_dtype is CacheDtype.FP8 else ""
        return f"heads of {self.head_dim}, GQA {self.group}, {self.attention}, {caches}{codes}"

    @property
    def needs_plugins(self) -> bool:
        """Whether only this project's kernels have its caches."""
        return self.is_paged or self.cache_dtype is CacheDtype.FP8


_FP8, _AUTO = CacheDtype.FP8, CacheDtype.COMPUTE
PAIRS = (
    RandomPair(8, "full", 128, True, _FP8, 1, 16, LONG),
    RandomPair(8, "sinks", 64, False, _AUTO, 2, 8, LONG),
    RandomPair(4, "full", 128, False, _AUTO, 2, 16, LONG),
    RandomPair(4, "sinks", 64, True, _AUTO, 2, 8, LONG),
    RandomPair(1, "window", 64, False, _AUTO, 4, 8, SHORT),
    RandomPair(1, "full", 64, False, _FP8, 4, 16, LONG),
    RandomPair(1, "window", 128, True, _FP8, 2, 8, SHORT),
)
"""In order of worth: what the largest public pairs have comes first."""


def write_random_pair(shape: RandomPair, folder: Path) -> Pair:
    """Writes the checkpoints to `folder` and reads them as any others."""
    pair, has_scales = _pair_shape(shape), shape.cache_dtype is CacheDtype.FP8
    if shape.attention == "sinks":
        write_gpt_oss(folder, pair, random=True, has_kv_scales=has_scales)
    else:
        write_pair(folder, pair, dtype="BF16", random=True, has_kv_scales=has_scales)
    return check_pair(read_target(folder / "target"), read_draft(folder / "draft"))


def configure(shape: RandomPair) -> BuildConfig:
    """The build configuration of a pair."""
    return BuildConfig.model_validate(
        {
            "description": shape.name,
            "target": {"checkpoint": "target"},
            "draft": {"checkpoint": "draft"},
            "max_batch": MAX_BATCH,
            "max_seq_len": shape.max_seq_len,
            "prefill_chunk": PREFILL_CHUNK,
        }
    )


def _pair_shape(shape: RandomPair) -> PairShape:
    layer = LayerSizes(shape.group * shape.kv_heads, shape.kv_heads, shape.head_dim)
    sliding = replace(layer, window=WINDOW)
    has_sinks = shape.attention == "sinks"
    layers = [sliding if has_sinks and not number % 2 else layer for number in range(LAYERS)]
    drafted = [
        sliding if shape.attention == "window" and not number else layer
        for number in range(DRAFT_LAYERS)
    ]
    target = TargetShape(
        sizes=DecoderSizes(
            hidden_size=HIDDEN,
            intermediate_size=MLP,
            layers=tuple(layers),
            experts=ExpertSizes(EXPERTS, EXPERTS, MLP) if has_sinks else None,
        ),
        vocab_size=VOCABULARY,
        max_position_embeddings=2 * LONG,
    )
    return PairShape(
        name="random",
        target=target,
        draft=DraftShape(
            sizes=replace(target.sizes, layers=tuple(drafted), experts=None),
            max_position_embeddings=target.max_position_embeddings,
            block_size=shape.block_size,
            mask_token_id=VOCABULARY - 1,
            target_layer_ids=TAPS,
            vocab_size=VOCABULARY,
        ),
    )

"""The demo pair's recipe as data: shapes, steps and seeds. The defaults remake `demo_pair/`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from demo_pair.recipe.tokenizer import END_ID
from dflash_trt.models.sizes import DecoderSizes, ExpertSizes, LayerSizes

LossReport = Callable[[str, int, int, float], None]
"""(what, steps done, steps in all, loss)"""


def small_sizes(
    layers: int, heads: int = 2, kv_heads: int = 1, intermediate: int = 192
) -> DecoderSizes:
    """A Qwen3-style decoder."""
    layer = LayerSizes(heads, kv_heads, 32)
    return DecoderSizes(hidden_size=64, intermediate_size=intermediate, layers=(layer,) * layers)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stretch of training, `rows` of `length` tokens a step; None `layers` adds none.

    The rate peaks at `lr` after `warmup` steps and falls linearly to `lr * floor`.
    `round_experts` rounds them to MXFP4 and freezes them first.
    """

    length: int
    rows: int
    steps: int
    lr: float
    layers: int | None = None
    warmup: int = 50
    floor: float = 0.1
    round_experts: bool = False


@dataclass(frozen=True, slots=True)
class DraftStage(Stage):
    """A stretch of draft training: rows of the corpus, and the target's own continuations of the
    beginnings of others, greedy and at temperature 1."""

    corpus_rows: int = 0
    greedy_rows: int = 0
    sampled_rows: int = 0


SHORT_ROWS = DraftStage(length=384, rows=4, steps=0, lr=3e-3, warmup=20)
LONG_ROWS = DraftStage(length=1024, rows=2, steps=0, lr=1e-3, warmup=10, floor=0.05)
"""How a draft is trained first, and then; how long, each recipe says."""


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """Everything that decides the weights, besides the versions of the libraries.

    Of gpt-oss alone: `balance` weighs the loss that keeps all experts in use, and YaRN stretches
    rotary embeddings from `yarn_length` positions to `max_length`.
    """

    seed: int = 0
    vocab_size: int = 464
    tokenizer_documents: int = 2000
    rope_theta: float = 10_000.0
    block_size: int = 8
    target: DecoderSizes = small_sizes(layers=32)
    target_stages: tuple[Stage, ...] = (
        Stage(layers=8, length=256, rows=8, steps=900, lr=4e-3, floor=0.25),
        Stage(length=512, rows=4, steps=700, lr=3e-3, warmup=20, floor=0.3),
        Stage(layers=32, length=512, rows=4, steps=200, lr=1.5e-3, warmup=20, floor=0.3),
        Stage(length=1024, rows=2, steps=80, lr=1e-3, warmup=10, floor=0.05),
    )
    embedding_rate: float = 0.1
    expert_rate: float = 1.0
    balance: float = 0.01
    yarn_length: int = 256
    draft: DecoderSizes = small_sizes(layers=2, heads=4, kv_heads=2, intermediate=256)
    draft_taps: tuple[int, ...] = (1, 8, 15, 22, 29)
    draft_loss_gamma: float = 4.0
    draft_anchors: int = 48
    draft_stages: tuple[DraftStage, ...] = (
        replace(SHORT_ROWS, steps=1500, corpus_rows=512, greedy_rows=256, sampled_rows=128),
        replace(LONG_ROWS, steps=300, corpus_rows=192, greedy_rows=64, sampled_rows=64),
    )
    qk_norm_start: float = 1.7
    weight_decay: float = 0.05
    clip: float = 1.0
    prompts: int = 32
    max_length: int = 1024
    threads: int = 1

    def target_fields(self, layers: int) -> dict[str, Any]:
        """What the transformers configs of both families' targets have in common."""
        sizes = self.target
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.mlp_size,
            "num_hidden_layers": layers,
            "num_attention_heads": sizes.layer.heads,
            "num_key_value_heads": sizes.layer.kv_heads,
            "head_dim": sizes.layer.head_dim,
            "max_position_embeddings": self.max_length,
            "bos_token_id": None,
            "eos_token_id": END_ID,
            "pad_token_id": END_ID,
            "initializer_range": 1 / math.sqrt(sizes.hidden_size),
            "use_cache": False,
        }


DEMO = TrainingRecipe()

GPT_OSS = TrainingRecipe(
    # Four experts as wide as the MLP, two chosen; every second layer sees 64 positions.
    target=replace(
        small_sizes(layers=6, intermediate=96).with_layers((64, None) * 3, has_sinks=True),
        experts=ExpertSizes(experts=4, chosen=2, intermediate_size=96),
    ),
    target_stages=(
        Stage(length=256, rows=8, steps=600, lr=4e-3, floor=0.25),
        Stage(length=512, rows=4, steps=350, lr=3e-3, warmup=20, floor=0.1),
        Stage(length=1024, rows=2, steps=80, lr=1e-3, warmup=10, floor=0.05, round_experts=True),
    ),
    expert_rate=0.5,
    draft_taps=(0, 1, 2, 3, 4),
    draft_stages=(
        replace(SHORT_ROWS, steps=800, corpus_rows=256, greedy_rows=128, sampled_rows=64),
        replace(LONG_ROWS, steps=150, corpus_rows=96, greedy_rows=64),
    ),
)
"""A gpt-oss pair of a few layers: sinks, windows, YaRN, MXFP4 experts."""

"""What the demo pair can do: perplexity, variety of its text, and acceptance length.

Acceptance is measured without the speculative loop. That is lossless, so the tokens are the
target's own, greedy or sampled, and the draft's block at every position says how the loop would
walk over them (arXiv 2602.06036; a sampled token is accepted if it equals the draft's).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from demo_pair.recipe.draft import tapped_features
from demo_pair.recipe.recipe_settings import TrainingRecipe
from demo_pair.recipe.target import continue_rows
from demo_pair.recipe.tokenizer import END_ID

ANCHORS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class DraftMetrics:
    """The demo pair's figures on held-out documents.

    Args:
        perplexity: exp of the mean cross-entropy a token, whole documents, header included.
        distinct_8grams: different ÷ all 8-grams of the greedy output of all prompts together.
        acceptance_greedy: tokens per verify step, bonus included, 1 to the block size.
        acceptance_sampled: the same at temperature 1.
    """

    perplexity: float
    distinct_8grams: float
    acceptance_greedy: float
    acceptance_sampled: float


def drafts_everywhere(recipe: TrainingRecipe, model: Any, ids: Tensor, features: Tensor) -> Tensor:
    """The draft's tokens for a block at every position: [rows, length, block - 1] int64.

    Entry [b, n] is drafted from the anchor ids[b, n] and the features of positions below n.
    """
    rows, length = ids.shape
    chunks = []
    model.dflash_module.eval()
    with torch.no_grad():
        for first in range(0, length, ANCHORS_AT_ONCE):
            positions = torch.arange(first, min(first + ANCHORS_AT_ONCE, length))
            context = features[:, : positions[-1]]
            anchors, blocks, seen = positions.expand(rows, -1), len(positions), context.shape[1]
            keep = torch.ones_like(anchors, dtype=torch.bool)
            hidden = model.dflash_module(
                noise_embedding=model._build_noise_embedding(ids, anchors, keep, blocks),
                target_hidden=context,
                position_ids=model._build_position_ids(seen, anchors, ids.device),
                attention_mask=model._build_draft_attention_mask(
                    seen, anchors, keep, blocks, features.dtype, ids.device
                ),
            )
            tokens = model.lm_head(hidden).argmax(dim=-1)
            chunks.append(tokens.view(rows, blocks, recipe.block_size)[:, :, 1:])
    drafts: Tensor = torch.cat(chunks, dim=1)
    return drafts


def accepted_lengths(row: Sequence[int], drafts: Sequence[Sequence[int]], first: int) -> list[int]:
    """Tokens emitted by each verify step when decoding `row` from its anchor at `first`.

    `drafts` are the blocks drafted from each anchor. Steps whose block lies inside `row` count.
    """
    steps: list[int] = []
    anchor, size = first, len(drafts[0])
    while anchor + size < len(row):
        matches = map(eq, drafts[anchor], row[anchor + 1 : anchor + 1 + size])
        steps.append(1 + sum(takewhile(bool, matches)))
        anchor += steps[-1]
    return steps


def acceptance(
    recipe: TrainingRecipe,
    target: Qwen3ForCausalLM,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Sequence[int]],
) -> float:
    """Mean tokens per verify step over all rows (each: a prompt and the target's tokens)."""
    steps: list[int] = []
    for first in range(0, len(rows), 8):
        some = rows[first : first + 8]
        longest = max(map(len, some))
        ids = torch.tensor([[*row, *[END_ID] * (longest - len(row))] for row in some])
        features = tapped_features(recipe, target, ids)
        drafts = drafts_everywhere(recipe, draft, ids, features).tolist()
        for prompt, row, blocks in zip(prompts[first : first + 8], some, drafts, strict=True):
            steps += accepted_lengths(row, blocks, len(prompt))
    return sum(steps) / len(steps)


def evaluate(
    recipe: TrainingRecipe,
    target: Qwen3ForCausalLM,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    held_out: Tensor,
) -> DraftMetrics:
    """The pair's metrics on held-out prompts and on held-out rows [rows, length]."""
    greedy = continue_rows(target, prompts, recipe.new_tokens)
    sampled = continue_rows(target, prompts, recipe.new_tokens, temperature=1.0, seed=recipe.seed)
    outputs = [row[len(prompt) :] for prompt, row in zip(prompts, greedy, strict=True)]
    grams = [tuple(row[i : i + 8]) for row in outputs for i in range(len(row) - 7)]
    with torch.no_grad():
        losses = [float(target(input_ids=r, labels=r).loss) for r in torch.split(held_out, 4)]
    return DraftMetrics(
        perplexity=math.exp(sum(losses) / len(losses)),
        distinct_8grams=len(set(grams)) / len(grams),
        acceptance_greedy=acceptance(recipe, target, draft, prompts, greedy),
        acceptance_sampled=acceptance(recipe, target, draft, prompts, sampled),
    )

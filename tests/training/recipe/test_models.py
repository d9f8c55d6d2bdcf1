"""Growing keeps the function; continuations, features and drafts match their plain forms."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from transformers import Qwen3ForCausalLM

from demo_pair.recipe.draft import attach_draft, tapped_features
from demo_pair.recipe.evaluate import accepted_lengths, drafts_everywhere
from demo_pair.recipe.recipe_settings import TrainingRecipe, small_sizes
from demo_pair.recipe.target import build_target, continue_rows, deepen
from demo_pair.recipe.tokenizer import MASK_ID

TINY = replace(
    TrainingRecipe(),
    vocab_size=96,
    max_length=128,
    target=small_sizes(layers=6, hidden=32, head_dim=16, intermediate=48),
    draft=small_sizes(layers=2, hidden=32, head_dim=16, intermediate=48),
    draft_taps=(0, 2, 5),
)


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return build_target(TINY, 6).train(False)


def test_deepen_keeps_the_function(target: Qwen3ForCausalLM) -> None:
    ids = torch.randint(0, 96, (2, 20))
    deep = deepen(TINY, target, 15).train(False)
    assert deep.config.num_hidden_layers == 15
    with torch.no_grad():
        assert torch.equal(deep(ids).logits, target(ids).logits)


def test_greedy_rows_are_the_argmax_of_a_plain_forward(target: Qwen3ForCausalLM) -> None:
    prompts = [[5, 9, 11], [7, 8, 9, 10, 11, 12]]
    rows = continue_rows(target, prompts, 20)
    for prompt, row in zip(prompts, rows, strict=True):
        assert row[: len(prompt)] == prompt
        assert len(row) == len(prompt) + 20
        with torch.no_grad():
            best = target(torch.tensor([row])).logits[0].argmax(dim=-1).tolist()
        assert row[len(prompt) :] == best[len(prompt) - 1 : -1]


def test_drafts_everywhere_match_one_block_at_a_time(target: Qwen3ForCausalLM) -> None:
    pytest.importorskip("modelopt")
    torch.manual_seed(1)
    model = attach_draft(TINY, target)
    ids = torch.randint(2, 96, (2, 80))
    features = tapped_features(TINY, target, ids)
    together = drafts_everywhere(TINY, model, ids, features)
    assert together.shape == (2, 80, TINY.block_size - 1)
    for row, anchor in ((0, 1), (0, 40), (1, 63), (1, 64), (1, 79)):
        block = torch.full((1, TINY.block_size), MASK_ID)
        block[0, 0] = ids[row, anchor]
        with torch.no_grad():
            hidden = model.dflash_module(
                noise_embedding=target.model.embed_tokens(block),
                target_hidden=features[row : row + 1, :anchor],
                position_ids=torch.arange(anchor + TINY.block_size)[None],
                attention_mask=None,
            )
            expected = target.lm_head(hidden)[0, 1:].argmax(dim=-1)
        assert together[row, anchor].tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(2))
def test_accepted_lengths_follow_the_loop(seed: int) -> None:
    rng = Random(seed)
    row = [rng.randrange(2) for _ in range(200)]
    drafts = [[rng.randrange(2) for _ in range(7)] for _ in row]
    expected, anchor = [], 10
    while anchor + 8 <= len(row):
        emitted = 1
        while emitted <= 7 and drafts[anchor][emitted - 1] == row[anchor + emitted]:
            emitted += 1
        expected.append(emitted)
        anchor += emitted
    assert accepted_lengths(row, drafts, 10) == expected

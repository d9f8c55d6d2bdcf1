"""The recipes from end to end at toy size, and the committed pairs: both are what they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from demo_pair.recipe.gpt_oss import round_experts
from demo_pair.recipe.make import load_target, make_demo_pair, save_target
from demo_pair.recipe.recipe_settings import (
    GPT_OSS,
    DraftStage,
    Stage,
    TrainingRecipe,
    expert_sizes,
    small_sizes,
)
from demo_pair.recipe.target import build_target, round_to_bf16
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import Pair, check_pair
from dflash_trt.models.rope import YarnScaling
from dflash_trt.models.target import read_target

DEMO_PAIR = Path(__file__).parents[3] / "demo_pair"
TARGET_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


TOY = replace(
    TrainingRecipe(),
    vocab_size=400,
    tokenizer_documents=50,
    target=small_sizes(layers=8, hidden=32, head_dim=16, intermediate=64),
    target_stages=(
        Stage(layers=4, length=64, rows=2, steps=3, lr=1e-3),
        Stage(layers=8, length=64, rows=2, steps=2, lr=1e-3),
    ),
    draft=small_sizes(layers=1, hidden=32, head_dim=16, intermediate=64),
    draft_taps=(1, 4, 6),
    draft_anchors=8,
    draft_stages=(
        DraftStage(128, rows=4, steps=3, lr=1e-3, corpus_rows=4, greedy_rows=2, sampled_rows=2),
    ),
    prompts=3,
    new_tokens=24,
    max_length=256,
)

TOY_GPT_OSS = replace(
    GPT_OSS,
    vocab_size=TOY.vocab_size,
    tokenizer_documents=TOY.tokenizer_documents,
    target=expert_sizes(small_sizes(layers=6, hidden=32, head_dim=16, intermediate=32)),
    target_stages=(
        Stage(length=64, rows=2, steps=2, lr=1e-3),
        Stage(length=64, rows=2, steps=2, lr=1e-3, round_experts=True),
    ),
    draft=TOY.draft,
    draft_taps=(1, 4),
    draft_anchors=TOY.draft_anchors,
    draft_stages=TOY.draft_stages,
    prompts=2,
    new_tokens=16,
)


def read_pair(folder: Path, recipe: TrainingRecipe) -> Pair:
    """The pair in `folder`, which is of the recipe's shapes and of the z-lab contract."""
    pair = check_pair(read_target(folder / "target"), read_draft(folder / "draft"))
    target, draft = pair.target, pair.draft
    sees_all = [None] * len(recipe.draft.layers)
    assert draft.sizes == recipe.draft.with_layers(sees_all, [False] * len(sees_all))
    assert replace(target.sizes, experts=None) == replace(recipe.target, experts=None)
    assert draft.num_target_layers == len(target.sizes.layers)
    assert draft.target_layer_ids == recipe.draft_taps
    assert (draft.block_size, draft.mask_token_id) == (recipe.block_size, 1)
    assert target.vocab_size == draft.vocab_size == recipe.vocab_size
    assert target.rope.theta == draft.rope.theta == recipe.rope_theta
    assert target.max_position_embeddings == recipe.max_length
    return pair


def check_files(directory: Path, recipe: TrainingRecipe) -> None:
    """What a loader of the z-lab contract relies on, for the pair that `recipe` makes."""
    pair = read_pair(directory, recipe)
    draft = json.loads((directory / "draft" / "config.json").read_text())
    assert {f.name for f in (directory / "target").iterdir()} == TARGET_FILES
    assert (draft["architectures"], draft["model_type"]) == (["DFlashDraftModel"], "qwen3")
    assert draft["torch_dtype"] == "bfloat16" and pair.target.tie_word_embeddings
    vocabulary = json.loads((directory / "target" / "tokenizer.json").read_text())["model"]["vocab"]
    assert (vocabulary["<|mask|>"], len(vocabulary)) == (1, recipe.vocab_size)
    entries = [*pair.draft.weights.values(), *pair.target.weights.values()]
    assert {entry.dtype for entry in entries} == {"BF16"}


def prompts(directory: Path) -> list[str]:
    lines = (directory / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def test_committed_pair() -> None:
    check_files(DEMO_PAIR, TrainingRecipe())
    assert len(set(prompts(DEMO_PAIR))) == TrainingRecipe().prompts
    assert "Apache-2.0" in (DEMO_PAIR / "README.md").read_text()


@pytest.mark.exhaustive
def test_recipe_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("modelopt")
    pair = tmp_path / "pair"
    metrics = make_demo_pair(TOY, pair, lambda *_: None)
    check_files(pair, TOY)
    assert len(prompts(pair)) == TOY.prompts and 0 < metrics.distinct_8grams <= 1
    assert not (tmp_path / ".pair.partial").exists()
    assert make_demo_pair(TOY, tmp_path / "again", lambda *_: None) == metrics
    for part in ("target", "draft"):
        weights = Path(part) / "model.safetensors"
        assert (tmp_path / "again" / weights).read_bytes() == (pair / weights).read_bytes()


def test_the_committed_gpt_oss_is_what_the_recipe_says() -> None:
    target = read_pair(DEMO_PAIR / "gpt_oss", GPT_OSS).target
    experts = GPT_OSS.target.experts
    assert experts is not None and target.moe is not None
    assert (target.moe.experts, target.moe.chosen) == (experts.experts, experts.chosen) == (4, 2)
    assert target.moe.storage == "MXFP4" and target.has_sinks
    assert target.layer_windows == (64, None) * 3
    assert isinstance(target.rope.scaling, YarnScaling)


def test_a_saved_target_computes_what_it_computed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_target(TOY_GPT_OSS, 4)
    weight = model.model.layers[1].mlp.experts.down_proj
    before = weight.detach().clone()
    round_experts(model)
    error = (weight - before).norm() / before.norm()
    assert 0.05 < float(error) < 0.2
    assert not weight.requires_grad
    round_to_bf16(model)
    model.train(False)
    save_target(model, tmp_path)
    ids = torch.randint(2, 400, (2, 90))
    with torch.no_grad():
        torch.testing.assert_close(
            load_target(tmp_path)(ids).logits, model(ids).logits, rtol=0, atol=0
        )


@pytest.mark.exhaustive
def test_gpt_oss_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("modelopt")
    make_demo_pair(TOY_GPT_OSS, tmp_path / "pair", lambda *_: None)
    moe = read_pair(tmp_path / "pair", TOY_GPT_OSS).target.moe
    assert moe is not None and moe.storage == "MXFP4"
    assert "--family gpt-oss" in (tmp_path / "pair" / "README.md").read_text()

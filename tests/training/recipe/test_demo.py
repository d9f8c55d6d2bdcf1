"""The recipes from end to end at toy size, and the committed pairs: both are what they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from demo_pair.recipe.recipe_settings import (
    GPT_OSS,
    TrainingRecipe,
)
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


def test_the_committed_gpt_oss_is_what_the_recipe_says() -> None:
    target = read_pair(DEMO_PAIR / "gpt_oss", GPT_OSS).target
    experts = GPT_OSS.target.experts
    assert experts is not None and target.moe is not None
    assert (target.moe.experts, target.moe.chosen) == (experts.experts, experts.chosen) == (4, 2)
    assert target.moe.storage == "MXFP4" and target.has_sinks
    assert target.layer_windows == (64, None) * 3
    assert isinstance(target.rope.scaling, YarnScaling)

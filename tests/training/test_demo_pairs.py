"""The pairs that ship are what their recipes say, and change no token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

import dflash_trt
from demo_pair.recipe.corpus import TRAIN_STREAM, document, documents
from demo_pair.recipe.recipe_settings import DEMO, GPT_OSS, TrainingRecipe
from demo_pair.recipe.tokenizer import save_tokenizer, train_tokenizer
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import Pair, check_pair
from dflash_trt.models.rope import YarnScaling
from dflash_trt.models.target import read_target
from tests.frozen.canonical import ROOT

DEMO_PAIR = ROOT / "demo_pair"
LEAST_TAU = {"dflash": 3.0, "dflash2": 3.5, "dspark": 4.0, "eagle3": 3.0}


def read_pair(folder: Path, recipe: TrainingRecipe) -> Pair:
    """The pair in `folder`, which is of the recipe's shapes and of the z-lab contract."""
    pair = check_pair(read_target(folder / "target"), read_draft(folder / "draft"))
    target, draft = pair.target, pair.draft
    sees_all = [None] * len(recipe.draft.layers)
    assert draft.sizes == recipe.draft.with_layers(sees_all, [False] * len(sees_all))
    assert replace(target.sizes, experts=None) == replace(recipe.target, experts=None)
    assert draft.target_layer_ids == recipe.draft_taps
    assert (draft.block_size, draft.mask_token_id) == (recipe.block_size, 1)
    assert target.vocab_size == draft.vocab_size == recipe.vocab_size
    assert target.rope.theta == draft.rope.theta == recipe.rope_theta
    assert target.max_position_embeddings == recipe.max_length
    return pair


def test_the_demo_pair_is_what_the_recipe_says() -> None:
    pair = read_pair(DEMO_PAIR, DEMO)
    entries = [*pair.draft.weights.values(), *pair.target.weights.values()]
    assert {entry.dtype for entry in entries} == {"BF16"} and pair.target.tie_word_embeddings
    lines = (DEMO_PAIR / "prompts.jsonl").read_text().splitlines()
    assert len({json.loads(line)["prompt"] for line in lines}) == DEMO.prompts
    assert "Apache-2.0" in (DEMO_PAIR / "README.md").read_text()


def test_the_gpt_oss_pair_is_what_the_recipe_says() -> None:
    target = read_pair(DEMO_PAIR / "gpt_oss", GPT_OSS).target
    experts = GPT_OSS.target.experts
    assert experts is not None and target.moe is not None
    assert (target.moe.experts, target.moe.chosen) == (experts.experts, experts.chosen) == (4, 2)
    assert target.moe.storage == "MXFP4" and target.has_sinks
    assert target.layer_windows == (64, None) * 3
    assert isinstance(target.rope.scaling, YarnScaling)


def test_first_document_is_golden() -> None:
    assert document(0, TRAIN_STREAM, 0).splitlines()[:4] == [
        "route #8262 to #8274 in lima at load 8",
        "parcels: wet ram gold, mad hen silver, odd pug silver",
        "drivers: ben, ana, leo",
        "parcel #8262 holds wet ram, gold, load 8",
    ]


def test_a_trained_tokenizer_keeps_any_text(tmp_path: Path) -> None:
    trained = train_tokenizer(documents(0, TRAIN_STREAM, 100), 400)
    fast: PreTrainedTokenizerFast = save_tokenizer(trained, tmp_path, 128)
    for text in ("", " ", "\n\n\t x", "naïve café 😀 漢字", "007 #12", "a\x00b\x7f"):
        assert fast.decode(fast(text)["input_ids"]) == text


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", LEAST_TAU)
def test_drafts_of_four_kinds_change_no_token(kind: str, tmp_path: Path) -> None:
    bundle = dflash_trt.build(f"demo-{kind}", tmp_path / "bundle")
    lines = (DEMO_PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    prompts = [json.loads(line)["prompt"] for line in lines]
    answers, tau = [], 0.0
    for speculation in (True, False):
        with dflash_trt.load(
            bundle.folder, threads=1, block_schedule="none", speculation=speculation
        ) as pair:
            results = pair.generate(prompts, max_tokens=64, ignore_eos=True)
        answers.append([one.token_ids for one in results])
        if speculation:
            steps = sum(one.statistics.steps for one in results)
            tau = sum(len(one.token_ids) - 1 for one in results) / steps
    assert answers[0] == answers[1]
    assert tau > LEAST_TAU[kind]

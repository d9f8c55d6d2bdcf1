"""The committed pair keeps its contract, and the recipe runs from end to end at toy size."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.training.recipe import DraftStage, Stage, TrainingRecipe, small_sizes

DEMO_PAIR = Path(__file__).parents[2] / "demo_pair"
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
    target=small_sizes(layers=8, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=64),
    target_stages=(
        Stage(layers=4, length=64, rows=2, steps=3, lr=1e-3),
        Stage(layers=8, length=64, rows=2, steps=2, lr=1e-3),
    ),
    draft=small_sizes(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=64),
    draft_taps=(1, 4, 6),
    draft_anchors=8,
    draft_stages=(
        DraftStage(128, rows=4, steps=3, lr=1e-3, corpus_rows=4, greedy_rows=2, sampled_rows=2),
    ),
    prompts=3,
    new_tokens=24,
    max_length=256,
)


def tensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Name to dtype and shape, read from the safetensors header alone."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}


def check_contract(directory: Path, recipe: TrainingRecipe) -> None:
    """What a loader of the z-lab contract relies on, for the pair that `recipe` makes."""
    target = json.loads((directory / "target" / "config.json").read_text())
    draft = json.loads((directory / "draft" / "config.json").read_text())
    assert {f.name for f in (directory / "target").iterdir()} == TARGET_FILES
    assert draft["architectures"] == ["DFlashDraftModel"]
    assert draft["model_type"] == "qwen3"
    assert draft["block_size"] == recipe.block_size
    assert draft["dflash_config"]["mask_token_id"] == 1
    assert draft["dflash_config"]["target_layer_ids"] == list(recipe.draft_taps)
    assert draft["num_target_layers"] == target["num_hidden_layers"] == len(recipe.target.layers)
    assert draft["hidden_size"] == target["hidden_size"] == recipe.target.hidden_size
    assert draft["vocab_size"] == target["vocab_size"] == recipe.vocab_size
    assert draft["rope_theta"] == target["rope_parameters"]["rope_theta"] == recipe.rope_theta
    assert draft["torch_dtype"] == target["dtype"] == "bfloat16"
    assert target["architectures"] == ["Qwen3ForCausalLM"]
    assert target["tie_word_embeddings"] is True
    assert target["max_position_embeddings"] == recipe.max_length
    vocabulary = json.loads((directory / "target" / "tokenizer.json").read_text())
    assert vocabulary["model"]["vocab"]["<|mask|>"] == 1
    assert len(vocabulary["model"]["vocab"]) == recipe.vocab_size

    weights = tensors(directory / "draft" / "model.safetensors")
    assert len(weights) == 3 + 11 * len(recipe.draft.layers)
    fused = len(recipe.draft_taps) * recipe.target.hidden_size
    assert weights["fc.weight"] == ("BF16", [recipe.draft.hidden_size, fused])
    everything = [*weights.values(), *tensors(directory / "target" / "model.safetensors").values()]
    assert {dtype for dtype, _ in everything} == {"BF16"}
    assert 2 * sum(prod(shape) for _, shape in everything) <= 12 * 10**6


def prompts(directory: Path) -> list[str]:
    lines = (directory / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


@pytest.mark.skipif(not DEMO_PAIR.exists(), reason="the demo pair is not in this checkout")
def test_committed_pair() -> None:
    check_contract(DEMO_PAIR, TrainingRecipe())
    assert len(set(prompts(DEMO_PAIR))) == TrainingRecipe().prompts
    assert "Apache-2.0" in (DEMO_PAIR / "README.md").read_text()


def test_recipe_end_to_end(tmp_path: Path) -> None:
    for name in ("torch", "transformers", "tokenizers", "modelopt"):
        pytest.importorskip(name)
    from dflash_trt.training.demo import make_demo_pair

    seen: list[str] = []
    metrics = make_demo_pair(TOY, tmp_path / "pair", lambda what, *_: seen.append(what))
    check_contract(tmp_path / "pair", TOY)
    assert len(prompts(tmp_path / "pair")) == TOY.prompts
    assert 1 <= metrics.acceptance_greedy <= TOY.block_size
    assert 1 <= metrics.acceptance_sampled <= TOY.block_size
    assert 0 < metrics.distinct_8grams <= 1
    assert {"target stage 1", "target stage 2", "draft stage 1"} <= set(seen)
    assert not (tmp_path / ".pair.partial").exists()

    again = make_demo_pair(TOY, tmp_path / "again", lambda *_: None)
    assert again == metrics
    for part in ("target", "draft"):
        first = (tmp_path / "pair" / part / "model.safetensors").read_bytes()
        assert (tmp_path / "again" / part / "model.safetensors").read_bytes() == first

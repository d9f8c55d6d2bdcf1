"""The gpt-oss recipe: native MXFP4 that loads as it was trained, and the committed pair."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.pair import check_pair
from dflash_trt.checkpoints.rope import YarnScaling
from dflash_trt.checkpoints.target import read_target
from dflash_trt.training.recipe import GPT_OSS, DraftStage, Stage, expert_sizes, small_sizes

pytestmark = pytest.mark.numeric

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

COMMITTED = Path(__file__).parents[2] / "demo_pair" / "gpt_oss"
TOY = replace(
    GPT_OSS,
    vocab_size=400,
    tokenizer_documents=50,
    target=expert_sizes(
        small_sizes(layers=6, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=32)
    ),
    target_stages=(
        Stage(length=64, rows=2, steps=2, lr=1e-3),
        Stage(length=64, rows=2, steps=2, lr=1e-3, round_experts=True),
    ),
    draft=small_sizes(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=64),
    draft_taps=(1, 4),
    draft_anchors=8,
    draft_stages=(
        DraftStage(128, rows=4, steps=2, lr=1e-3, corpus_rows=4, greedy_rows=2, sampled_rows=2),
    ),
    prompts=2,
    new_tokens=16,
)


def test_the_committed_pair_is_what_the_recipe_says() -> None:
    target, draft = read_target(COMMITTED / "target"), read_draft(COMMITTED / "draft")
    check_pair(target, draft)
    wanted = GPT_OSS.target
    assert wanted.experts is not None and target.moe is not None
    assert (target.moe.experts, target.moe.chosen) == (4, 2)
    assert (wanted.experts.experts, wanted.experts.chosen) == (4, 2)
    assert target.moe.storage == "MXFP4" and target.has_sinks
    assert target.layer_windows == (64, None) * 3
    assert replace(target.sizes, experts=None) == replace(wanted, experts=None)
    assert draft.sizes == GPT_OSS.draft.with_layers((None, None), (False, False))
    assert isinstance(target.rope.scaling, YarnScaling) and target.rope.theta == draft.rope.theta
    assert tuple(draft.target_layer_ids) == GPT_OSS.draft_taps
    size = sum(path.stat().st_size for path in COMMITTED.rglob("*.safetensors"))
    assert size < 1_000_000


def test_a_saved_target_computes_what_it_computed(tmp_path: Path) -> None:
    from dflash_trt.training.demo import load_target, save_target
    from dflash_trt.training.gpt_oss import round_experts
    from dflash_trt.training.target import build_target, round_to_bf16

    torch.manual_seed(0)
    model = build_target(TOY, 4)
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


def test_every_parameter_is_trained_by_its_kind() -> None:
    from dflash_trt.training.target import Optimizer, build_target

    model = build_target(TOY, 2)
    muon, adam = Optimizer(TOY, model).parts
    shapes = {tuple(one.shape) for group in muon.param_groups for one in group["params"]}
    assert shapes == {(32, 32), (16, 32)}  # attention's matrices alone
    grouped = sum(len(group["params"]) for part in (muon, adam) for group in part.param_groups)
    assert grouped == len(list(model.parameters()))
    scales = [group.get("scale", 1.0) for group in adam.param_groups]
    assert scales == [1.0, TOY.embedding_rate, TOY.expert_rate]


def test_recipe_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("modelopt")
    from dflash_trt.training.demo import make_demo_pair

    metrics = make_demo_pair(TOY, tmp_path / "pair", lambda *_: None)
    assert 1 <= metrics.acceptance_greedy <= TOY.block_size
    pair = check_pair(read_target(tmp_path / "pair/target"), read_draft(tmp_path / "pair/draft"))
    assert pair.target.moe is not None and pair.target.moe.storage == "MXFP4"
    assert "--family gpt-oss" in (tmp_path / "pair" / "README.md").read_text()

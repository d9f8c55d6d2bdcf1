"""DeepSpec's drafts against an independent writing-down, slot by slot, and as they are replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor

from dflash_trt.building.bundle_writer import BuildOptions
from dflash_trt.decoding.replay.edits import add_output, draft_logits, load_graph
from dflash_trt.graph.bindings import DRAFT_TOKEN_IDS
from tests.graph.runner import GraphRunner, tokens
from tests.graph.test_draft_numerics import check_blocks
from tests.pairs import PairFactory, TinyPair, bundle_pair
from tests.reference.compare import max_relative_error
from tests.reference.deepspec import DeepSpecDraft, write_deepspec
from tests.reference.generate import forward_with_taps

STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RANK = 12


def rewritten(
    make_pair: PairFactory, folder: Path, rank: int, target: dict[str, Any], **draft: Any
) -> tuple[TinyPair, DeepSpecDraft]:
    """A pair whose draft is in DeepSpec's layout, and its reference."""
    base = make_pair("qwen3", target, draft)
    (folder / "target").symlink_to(base.folder / "target")
    stored = STORED[target.get("dtype", "float32")]
    vocab, markov = base.pair.target.vocab_size, None
    if rank:
        torch.manual_seed(3)
        first, second = torch.randn(vocab, rank), torch.randn(vocab, rank) * 0.4
        markov = first.to(stored), second.to(stored)
    write_deepspec(folder / "draft", base.folder / "draft", base.folder / "target", markov)
    wide: tuple[Tensor, Tensor] | None = None
    if markov is not None:
        wide = markov[0].float(), markov[1].float()
    return bundle_pair(folder, BuildOptions()), DeepSpecDraft(base.reference_draft, wide)


@pytest.mark.parametrize(
    ("rank", "target"),
    [
        (0, {"vocab": 192}),
        (RANK, {"vocab": 192}),
        (RANK, {"vocab": 192, "dtype": "bfloat16", "tie": True}),
    ],
    ids=["moved by a slot", "Markov head", "bfloat16, tied"],
)
def test_every_slot_drafts_what_the_reference_does(
    rank: int, target: dict[str, Any], make_pair: PairFactory, tmp_path: Path
) -> None:
    draft = {"target_layer_ids": [1, 3], "dtype": target.get("dtype", "float32")}
    pair, reference = rewritten(make_pair, tmp_path, rank, target, **draft)
    assert pair.bundle.manifest.draft.kind == ("DSpark" if rank else "DFlash")
    assert pair.bundle.manifest.draft.anchor_drafts
    check_blocks(pair, reference, [(0, 1), (7, 33), (82, 81)], (2, 5, 8), scratch=-1)


def test_every_slots_logits_are_the_references(make_pair: PairFactory, tmp_path: Path) -> None:
    """The chain's own, each on the token that the slot before chose."""
    target = {"vocab": 192, "dtype": "bfloat16", "tie": True}
    draft = {"target_layer_ids": [1, 3], "dtype": "bfloat16"}
    pair, reference = rewritten(make_pair, tmp_path, RANK, target, **draft)
    model = load_graph(pair.bundle.folder / "draft.onnx")
    told = draft_logits(model)
    add_output(model, told)
    runner = GraphRunner(pair, batch=2, models={"draft": model})
    ids = tokens(192, 2, 90, seed=5)
    anchors = ids[:, -1].tolist()
    runner.target(ids, [0, 0])
    layers = reference.config.target_layer_ids
    _, taps = forward_with_taps(pair.reference, torch.tensor(ids), layers)
    projected = reference.project(taps)
    compared = 0
    for starts in ((0, 1), (7, 33), (82, 81)):
        for block in (2, 5, 8):
            outputs = runner.draft(anchors, starts, block)
            scored = outputs[told].reshape(2, -1, 192)
            for b, start in enumerate(starts):
                context = [(k[b : b + 1, :, :start], v[b : b + 1, :, :start]) for k, v in projected]
                want = reference.draft(torch.tensor(anchors[b : b + 1]), start, context, block)
                for slot in range(1, block):
                    if (outputs[DRAFT_TOKEN_IDS][b, :slot] != want.ids[0, :slot].numpy()).any():
                        break  # a tie: from here on it is another chain
                    error = max_relative_error(scored[b, slot - 1], want.logits[0, slot])
                    assert error <= 1e-4, (starts, block, slot)
                    compared += 1
    assert compared > 60, "ties end few chains"


def test_the_head_moves_what_is_drafted(make_pair: PairFactory, tmp_path: Path) -> None:
    pair, _ = rewritten(make_pair, tmp_path, RANK, {"vocab": 192}, target_layer_ids=[1, 3])
    graph = onnx.load(pair.bundle.folder / "draft.onnx", load_external_data=False).graph
    held = {one.name: list(one.dims) for one in graph.initializer}
    assert held["draft/markov_w1"] == held["draft/markov_w2"] == [192, RANK]
    assert not [name for name in held if "confidence" in name or name == "draft/lm_head"]

"""EAGLE-3 chains against the head as published, row by row, over ragged contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.building.spec import BuildSpec
from dflash_trt.decoding.replay.edits import add_output, draft_logits, load_graph
from dflash_trt.graph.bindings import DRAFT_TOKEN_IDS
from tests.covering import exhaustive
from tests.graph.runner import BOUND, GraphRunner, chunks, tokens
from tests.pairs import PairFactory, TinyPair, bundle_pair
from tests.reference.compare import max_relative_error
from tests.reference.eagle import ReferenceEagle, write_eagle
from tests.reference.generate import forward_with_taps

CONTEXT = 60
LOGITS = 1e-4
"""What each step's logits may differ by, as a share of the largest."""
STARTS = [(1, 2), (7, 33), (58, 40)]
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"layout": "eagle"},
    "bfloat16, rope of its own": {"layout": "eagle", "dtype": "bfloat16", "rope_theta": 5e4},
    "modelopt, default taps": {"layout": "modelopt", "taps": None},
    "speculators": {"layout": "speculators", "carries_norm": True},
    "speculators, Qwen3, 3.1": {
        "layout": "speculators",
        "layer": "qwen3",
        "norms": "fc_norm",
        "taps": (1, 2, 5),
        "norm_output": True,
        "embed_requires_grad": True,
        "architectures": ["Eagle3DraftModel"],
        "gru_hidden_dim": 4,
    },
    "speculators, one norm": {"layout": "speculators", "norms": "norm_before_fc"},
    "deepspec": {"layout": "deepspec", "draft_vocab": None, "taps": (1, 2, 3, 4, 5)},
}
DAILY = {"bfloat16, rope of its own", "speculators, Qwen3, 3.1", "speculators, one norm"}


def eagle_pair(
    make_pair: PairFactory, folder: Path, max_seq_len: int = 512, **head: Any
) -> TinyPair:
    base = make_pair("qwen3", {"vocab": 192})
    (folder / "target").symlink_to(base.folder / "target")
    write_eagle(folder / "draft", base.folder / "target", **head)
    return bundle_pair(folder, BuildSpec(), max_seq_len=max_seq_len)


@pytest.mark.parametrize("name", [one if one in DAILY else exhaustive(one) for one in HEADS])
def test_every_draft_is_the_published_heads(
    name: str, make_pair: PairFactory, tmp_path: Path
) -> None:
    pair = eagle_pair(make_pair, tmp_path, **HEADS[name])
    assert pair.bundle.manifest.draft.kind == "EAGLE-3"
    taps = pair.pair.draft.target_layer_ids
    assert taps == tuple(HEADS[name].get("taps", (1, 2, 4)) or (1, 2, 2))
    reference = ReferenceEagle.load(tmp_path / "draft", pair.reference, taps)
    ids = tokens(192, 2, CONTEXT, seed=5)
    model = load_graph(pair.bundle.folder / "draft.onnx")
    told = draft_logits(model)
    add_output(model, told)
    runner = GraphRunner(pair, batch=2, models={"draft": model})
    # Chunks begin with the last one's feature; positions behind a start are scratch.
    for first, last in chunks(CONTEXT, [17, 1, 5]):
        runner.target(ids[:, first:last], [first, first])
    _, features = forward_with_taps(pair.reference, torch.tensor(ids), taps, norms_last=False)
    unsure = compared = 0
    for starts in STARTS:
        anchors = [int(ids[b, start]) for b, start in enumerate(starts)]
        for block in (2, 5, 8):
            outputs = runner.draft(anchors, starts, block)
            got, scored = outputs[DRAFT_TOKEN_IDS], outputs[told]
            assert len(scored) == block - 1
            for b, start in enumerate(starts):
                known = torch.tensor(ids[b, : start + 1])
                want, logits = reference.drafts(known, features[b, :start], block - 1)
                assert got[b, 0] == anchors[b]
                for at, (draft, scores) in enumerate(zip(want, logits, strict=True), start=1):
                    error = max_relative_error(scored[at - 1, b], scores)
                    assert error <= LOGITS, (name, starts, block, at)
                    best = scores.topk(2).values
                    compared += 1
                    if best[0] - best[1] <= 4 * BOUND * scores.abs().max():
                        unsure += 1
                        break  # a chain goes on from a token that may be another
                    assert got[b, at] == draft, (name, starts, block, at)
    assert unsure < 0.05 * compared

"""Chains of EAGLE-3 heads and MTP layers against these as published, over ragged contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.building.spec import BuildSpec
from dflash_trt.decoding.replay.edits import Edits, add_output, draft_logits, load_graph
from dflash_trt.decoding.replay.replay_graphs import ReplayGraphs
from dflash_trt.graph.bindings import DRAFT_TOKEN_IDS
from tests.covering import exhaustive
from tests.graph.runner import BOUND, GraphRunner, chunks, tokens
from tests.pairs import PairFactory, TinyPair, bundle_pair
from tests.reference.checkpoints import write_target
from tests.reference.compare import max_relative_error
from tests.reference.eagle import ReferenceEagle, write_eagle
from tests.reference.generate import forward_with_taps
from tests.reference.mtp import ReferenceMtp, write_mtp

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
                count = follow(got[b, 1:], scored[:, b], want, logits)
                compared += min(count + 1, block - 1)
                unsure += count < block - 1
    assert unsure < 0.05 * compared


def follow(got: Any, scored: Any, want: list[int], logits: list[torch.Tensor]) -> int:
    """How many drafts are sure: a chain goes on from a token that may be another."""
    for at, (draft, scores) in enumerate(zip(want, logits, strict=True)):
        assert max_relative_error(scored[at], scores) <= LOGITS, at
        best = scores.topk(2).values
        if best[0] - best[1] <= 4 * BOUND * scores.abs().max():
            return at
        assert got[at] == draft, at
    return len(want)


LAYERS: dict[str, dict[str, Any]] = {
    "published": {"family": "qwen3_5", "dtype": "bfloat16", "vision": True},
    "tied, text alone": {"family": "qwen3_5", "tie": True, "head_dim": 32},
    "mixture": {"family": "qwen3_5_moe", "dtype": "bfloat16", "vision": True},
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_draft_is_the_published_layers(name: str, tmp_path: Path) -> None:
    """A target's own MTP layer, whose chain goes on with its normed output."""
    shape = {"vocab": 192, "num_layers": 4, "max_positions": 512} | LAYERS[name]
    folder = write_mtp(write_target(tmp_path / "target", **shape))
    (tmp_path / "draft").symlink_to(folder)
    pair = bundle_pair(tmp_path, BuildSpec(), prefill_chunk=17)
    assert pair.bundle.manifest.draft.kind == "MTP"
    reference = ReferenceMtp.load(folder, pair.reference)
    ids, starts = tokens(192, 1, CONTEXT, seed=5)[0], [1, 7, 33, 58]
    known = torch.tensor(ids)
    _, outputs = forward_with_taps(pair.reference, known[None], (3,))
    graphs = ReplayGraphs(pair.bundle, 1, Edits())
    context, caches = graphs.run_target(ids.tolist()), graphs.make_caches(4, CONTEXT + 8)
    for slot, start in enumerate(starts):
        caches.fill(slot, {cache: rows[:start] for cache, rows in context.items()})
    sure = 0
    for block in (2, 5, 8):
        found, scored = graphs.run_draft(caches, 0, ids[starts], np.array(starts), block)
        for slot, start in enumerate(starts):
            want = reference.drafts(known[: start + 1], outputs[0, :start], block - 1)
            sure += follow(found[slot], scored[slot], *want)
    assert sure > 40, "of 48 drafts"

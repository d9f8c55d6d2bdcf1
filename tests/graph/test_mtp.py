"""Chains of a target's MTP layer against the layer as published, over ragged contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.building.spec import BuildSpec
from dflash_trt.decoding.replay.edits import Edits
from dflash_trt.decoding.replay.replay_graphs import ReplayGraphs
from tests.graph.runner import BOUND, tokens
from tests.pairs import bundle_pair
from tests.reference.checkpoints import write_target
from tests.reference.compare import max_relative_error
from tests.reference.generate import forward_with_taps
from tests.reference.mtp import ReferenceMtp, write_mtp

VOCAB, LAYERS, CONTEXT = 192, 4, 60
STARTS = (1, 7, 33, 58)
LOGITS = 1e-4
"""What each step's logits may differ by, as a share of the largest."""
TARGETS: dict[str, dict[str, Any]] = {
    "dense, as published": {"family": "qwen3_5", "dtype": "bfloat16", "vision": True},
    "dense, tied, text alone": {"family": "qwen3_5", "tie": True, "head_dim": 32},
}


@pytest.mark.parametrize("name", TARGETS)
def test_every_draft_is_the_published_layers(name: str, tmp_path: Path) -> None:
    shape = {"vocab": VOCAB, "num_layers": LAYERS, "max_positions": 512} | TARGETS[name]
    folder = write_mtp(write_target(tmp_path / "target", **shape))
    (tmp_path / "draft").symlink_to(folder)
    pair = bundle_pair(tmp_path, BuildSpec(), prefill_chunk=17)
    assert pair.bundle.manifest.draft.kind == "MTP"
    assert pair.pair.draft.target_layer_ids == (LAYERS - 1,)
    reference = ReferenceMtp.load(folder, pair.reference)
    ids = tokens(VOCAB, 1, CONTEXT, seed=5)[0]
    known = torch.tensor(ids)
    _, outputs = forward_with_taps(pair.reference, known[None], (LAYERS - 1,))
    graphs = ReplayGraphs(pair.bundle, 1, Edits())
    context = graphs.run_target(ids.tolist())
    caches = graphs.make_caches(len(STARTS), CONTEXT + 8)
    for slot, start in enumerate(STARTS):
        caches.fill(slot, {name: rows[:start] for name, rows in context.items()})
    unsure = compared = 0
    for block in (2, 5, 8):
        found, scored = graphs.run_draft(caches, 0, ids[list(STARTS)], STARTS, block)
        for slot, start in enumerate(STARTS):
            want, logits = reference.drafts(known[: start + 1], outputs[0, :start], block - 1)
            for at, (draft, scores) in enumerate(zip(want, logits, strict=True)):
                error = max_relative_error(scored[slot, at], scores)
                assert error <= LOGITS, (name, start, block, at)
                best = scores.topk(2).values
                compared += 1
                if best[0] - best[1] <= 4 * BOUND * scores.abs().max():
                    unsure += 1
                    break  # a chain goes on from a token that may be another
                assert found[slot, at] == draft, (name, start, block, at)
    assert unsure < 0.05 * compared

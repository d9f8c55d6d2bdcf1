"""DFlash 2's draft graph against its reference: convolutions, scores and the walk."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto

from dflash_trt.building.spec import BuildSpec
from dflash_trt.decoding.replay.edits import add_output, draft_logits, load_graph
from dflash_trt.graph.dflash2.selector import _candidates
from dflash_trt.models.dflash2 import KEYS
from dflash_trt.models.draft_tokens import write_draft_tokens
from tests.graph.functions import builder, run_session
from tests.graph.runner import GraphRunner, tokens
from tests.graph.test_draft_numerics import CONTEXT, check_blocks
from tests.pairs import PairFactory, bundle_pair
from tests.reference.compare import max_relative_error
from tests.reference.deepspec import write_speculators
from tests.reference.dflash2 import Dflash2Draft, write_dflash2
from tests.reference.generate import forward_with_taps

BOUND = 1e-4
STARTS = [(0, 1), (7, 33), (82, 81)]


# Heads as Qwen3.8-27B's draft has them beside its target's: more of them, half as wide.
OTHER_HEADS = {"heads": 8, "kv_heads": 2, "head_dim": 8, "block_size": 16}
SLIDES = {"num_layers": 3, "layer_types": ["sliding_attention"] * 3, "sliding_window": 16}
CAPPED = {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}
BF16 = {"dtype": "bfloat16"}
CASES: dict[str, Any] = {
    "as z-lab's": ({"draft": SLIDES | OTHER_HEADS, "group": 16, "top_k": 16}, (2, 7, 16)),
    "small groups": ({"group": 4, "top_k": 32}, (2, 5, 8)),
    "one group, one candidate": ({"group": 64, "top_k": 1}, (2, 3, 8)),
    "shortlist": ({"group": 8, "top_k": 8, "shortlist": list(range(3, 250, 7))}, (2, 8)),
    "short shortlist": ({"top_k": 8, "shortlist": [3, 9, 250]}, (2, 4)),
    "speculators": ({"speculators": True, "shortlist": list(range(3, 250, 7))}, (2, 8)),
    "multiplier and cap": ({"family": "gemma3", **CAPPED}, (2, 8)),
    "bfloat16, tied": ({"target": BF16 | {"tie": True}, "draft": BF16}, (2, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_drafts_and_scores_equal_the_reference(
    name: str, make_pair: PairFactory, tmp_path: Path
) -> None:
    arguments, blocks = CASES[name]
    keys = ("family", "target", "draft", "shortlist", "speculators")
    own = {key: arguments.get(key) for key in keys}
    drafted = {"target_layer_ids": [1, 3], **(own["draft"] or {})}
    base = make_pair(own["family"] or "qwen3", own["target"], drafted)
    (tmp_path / "target").symlink_to(base.folder / "target")
    additions = {key: one for key, one in arguments.items() if key not in own}
    write_dflash2(tmp_path / "draft", base.folder / "draft", **additions)
    if own["speculators"]:
        source = (tmp_path / "draft").rename(tmp_path / "z-lab"), tmp_path / "target"
        stated = json.loads((source[0] / "config.json").read_text())["dflash_config"]
        added = {key: stated[key] for key in KEYS} | {"sliding_window_non_causal": ...}
        chosen = {"kind": "dflash2", "tokens": own["shortlist"]}
        write_speculators(tmp_path / "draft", *source, **chosen, **added)
    elif own["shortlist"]:
        write_draft_tokens(own["shortlist"], tmp_path / "draft")
    built = bundle_pair(tmp_path, BuildSpec())
    place = tmp_path / ("z-lab" if own["speculators"] else "draft")
    reference = Dflash2Draft.load(place, base.reference)
    reference.shortlist = own["shortlist"]
    assert built.bundle.manifest.draft.kind == "DFlash 2"
    check_blocks(built, reference, STARTS, blocks)

    # Every slot's scores along the walk, of blocks behind a context.
    model = load_graph(built.bundle.folder / "draft.onnx")
    add_output(model, told := draft_logits(model))
    ids = tokens(built.pair.target.vocab_size, 1, CONTEXT, seed=9)
    anchors, start = ids[:, -1].tolist(), 41
    runner = GraphRunner(built, models={"draft": model})
    runner.target(ids, [0])
    _, taps = forward_with_taps(
        built.reference, torch.tensor(ids), reference.config.target_layer_ids
    )
    context = [(k[:, :, :start], v[:, :, :start]) for k, v in reference.project(taps)]
    for block in blocks:
        outputs = runner.draft(anchors, [start], block)
        reference.draft(torch.tensor(anchors), start, context, block)
        assert max_relative_error(outputs[told][..., 1], reference.scores) <= BOUND


def test_candidates_ascend_and_the_lowest_of_equals_stay() -> None:
    """So that the walk's first highest score is the lowest token's, as everywhere."""
    b = builder()
    b.input("given", TensorProto.FLOAT, ["T", 6])
    scores, places = _candidates(SimpleNamespace(b=b), "given", 3)  # type: ignore[arg-type]
    b.output(scores, TensorProto.FLOAT, ["T", 3])
    b.output(places, TensorProto.INT64, ["T", 3])
    given = np.array([[1, 3, 3, 2, 3, 3], [0, 5, 9, 7, -1, -2], [4, 4, 4, 4, 4, 4]], np.float32)
    session = ort.InferenceSession(b.finish().SerializeToString())
    outputs = run_session(session, {"given": given})
    assert outputs[places].tolist() == [[1, 2, 4], [1, 2, 3], [0, 1, 2]]
    assert outputs[scores].tolist() == [[3, 3, 3], [5, 9, 7], [4, 4, 4]]

"""EAGLE-3 chains against the head as published, row by row, over ragged contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper

from dflash_trt.backends.tensorrt.build.builder import EngineOptions
from dflash_trt.backends.tensorrt.library import TENSORRT, find_arch
from dflash_trt.building.bundle_writer import BuildOptions
from dflash_trt.building.quantize import PairQuantization
from dflash_trt.core.progress import SilentProgress
from dflash_trt.decoding.replay.edits import add_output, draft_logits, load_graph
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import DRAFT_TOKEN_IDS, GraphName
from dflash_trt.graph.caches.native import SINK_DIMS, attend_with_rows, sink_rows
from dflash_trt.graph.call_rows import Rows
from dflash_trt.graph.form import CacheDtype, GraphForm, Precision
from dflash_trt.graph.model import GraphBuilder
from dflash_trt.graph.model_builder import ModelBuilder
from dflash_trt.graph.rope_tables import RopeTables
from dflash_trt.proof.diagnosis.diagnose import diagnose
from dflash_trt.training.draft_shape import shape_of
from tests.covering import exhaustive
from tests.graph.builds import build
from tests.graph.functions import attend
from tests.graph.runner import BOUND, GraphRunner, chunks, tokens
from tests.pairs import PairFactory, TinyPair, bundle_pair
from tests.reference.compare import max_relative_error
from tests.reference.eagle import ReferenceEagle, write_eagle
from tests.reference.generate import forward_with_taps

CONTEXT = 60
LOGITS = 1e-4
"""What each step's logits may differ by, as a share of the largest."""
HALF = 1e-2
"""The same in float16, whose target and features are rounded too."""
STARTS = [(1, 2), (7, 33), (58, 40)]
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"layout": "eagle"},
    "bfloat16, rope of its own": {"layout": "eagle", "dtype": "bfloat16", "rope_theta": 5e4},
    "modelopt, default taps": {"layout": "modelopt", "taps": None},
    "speculators": {"layout": "speculators", "carries_norm": True},
    "deepspec": {"layout": "deepspec", "draft_vocab": None, "taps": (1, 2, 3, 4, 5)},
}
DAILY = {"bfloat16, rope of its own", "speculators"}


def eagle_pair(
    make_pair: PairFactory, folder: Path, max_seq_len: int = 512, **head: Any
) -> TinyPair:
    base = make_pair("qwen3", {"vocab": 192})
    (folder / "target").symlink_to(base.folder / "target")
    write_eagle(folder / "draft", base.folder / "target", **head)
    return bundle_pair(folder, BuildOptions(), max_seq_len=max_seq_len)


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
    _, features = forward_with_taps(pair.reference, torch.tensor(ids), taps)
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


def test_an_engines_chain_is_the_cpus(make_pair: PairFactory, tmp_path: Path) -> None:
    """Unrolled, each step over TensorRT's attention and the rows beside it as one sink; float16.

    Caches hold noise where nothing was written; at their end a call's own drafts alone have places.
    """
    end, steps = 128, range(7)
    pair = eagle_pair(make_pair, tmp_path, max_seq_len=end)
    told = [f"chain/step_{step}/lm_head" for step in steps]
    names: tuple[GraphName, ...] = ("target", "draft")
    models = {name: build(pair, name, GraphForm(Precision.FLOAT16)) for name in names}
    kind = TensorProto.FLOAT16
    models["draft"].graph.output.extend(helper.make_tensor_value_info(t, kind, None) for t in told)
    engine = GraphRunner(pair, 2, end, models, fill=3.0)
    model = load_graph(pair.bundle.folder / "draft.onnx")
    every = draft_logits(model)
    add_output(model, every)
    cpu = GraphRunner(pair, 2, end, {"draft": model})
    ids = tokens(192, 2, end, seed=5)
    for first, last in chunks(end, [57, 1, 40]):
        for runner in (engine, cpu):
            runner.target(ids[:, first:last], [first, first])
    sizes = {name: cache.shape[3] for name, cache in engine.caches.items() if "draft_" in name}
    assert [*sizes.values()] == 2 * [16 + SINK_DIMS] + 2 * [32]
    compared = 0
    for starts, block in (((1, 9), 8), ((7, 33), 5), ((99, 64), 2), ((end - 3, 80), 3)):
        anchors = [int(ids[b, start]) for b, start in enumerate(starts)]
        found, wanted = (one.draft(anchors, starts, block) for one in (engine, cpu))
        assert found[DRAFT_TOKEN_IDS].shape == (2, block)
        for b in range(2):
            for step in range(block - 1):
                if (found[DRAFT_TOKEN_IDS] != wanted[DRAFT_TOKEN_IDS])[b, : step + 1].any():
                    break  # near ties: another chain
                error = max_relative_error(found[told[step]][b], wanted[every][step, b])
                assert error <= HALF, (starts, block, step)
                compared += 1
    assert compared > 20


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.FLOAT16])
def test_rows_beside_a_cache_weigh_what_they_should(
    precision: Precision, make_pair: PairFactory, tmp_path: Path
) -> None:
    """Scores near 50, where a float16 number may say e^x 1.6 % too high.

    ONNX Runtime's own attention rounds them so in float16, where the sink's logit alone is exact.
    """
    draft = eagle_pair(make_pair, tmp_path).pair.draft
    sizes, held, own = draft.sizes.layer, 9, 3
    b = GraphBuilder("test", str, GraphForm(precision))
    shapes = {"q": (2, sizes.heads, 1, sizes.head_dim)}
    for name, count in (("k", held), ("v", held), ("own_k", own), ("own_v", own)):
        shapes[name] = (2, sizes.kv_heads, count, sizes.head_dim)
    for name, shape in shapes.items():
        b.input(name, precision.onnx_type, shape)
    b.input("ids", TensorProto.INT64, (2, held))
    b.input("start", TensorProto.INT64, (2,))
    b.input("lengths", TensorProto.INT32, (2,))
    rows = Rows(b, "ids", "start")
    layer = ModelBuilder(b, "draft", draft, rows, RopeTables("draft", {})).layer(0)
    stored = sink_rows(layer, "k", "v")
    for cache, value in zip(layer.caches, stored, strict=True):
        b.node("Identity", [value], cache, output=cache)
    found = attend_with_rows(layer, "q", "own_k", "own_v", "lengths")
    for name in (found, "q_with_logit"):
        b.output(name, precision.onnx_type, [None] * 4)
    session = ort.InferenceSession(b.finish().SerializeToString())
    rng = np.random.default_rng(4)
    feeds = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    feeds |= {name: feeds[name] * 0.3 + 5 for name in ("k", "own_k")}
    feeds["q"] = feeds["q"] * 0.05 + 0.625
    dtype = np.float32 if precision is Precision.FLOAT32 else np.float16
    feeds = {name: array.astype(dtype) for name, array in feeds.items()}
    k, v = (np.concatenate([feeds[name], feeds[f"own_{name}"]], axis=2) for name in "kv")
    seen = np.ones((2, 1, held + own), bool)
    seen[:, :, 0] = seen[1, :, 5:held] = False  # the sink's place, and what is not held
    feeds |= {"ids": np.zeros((2, held), np.int64), "start": np.zeros(2, np.int64)}
    feeds["lengths"] = np.array([held, 5], np.int32)
    got, parts = session.run(None, feeds)
    if precision is Precision.FLOAT32:
        assert max_relative_error(got, attend(feeds["q"], k, v, seen)) < 1e-5
    by_head = np.repeat(feeds["own_k"].astype(float), sizes.heads // sizes.kv_heads, axis=1)
    scores = feeds["q"].astype(float) @ by_head.transpose(0, 1, 3, 2)
    logits = np.log(np.exp(scores).sum(-1))
    assert logits.min() > 40
    assert np.abs(parts[..., sizes.head_dim :].astype(float).sum(-1) - logits).max() < 1e-4


def test_what_has_no_graph_yet_is_refused(make_pair: PairFactory, tmp_path: Path) -> None:
    pair = eagle_pair(make_pair, tmp_path)
    wanted = PairQuantization({"target": "FP8"}, lambda *_: pytest.fail("nothing is observed"))
    with pytest.raises(DflashError, match="for which quantising the pair cannot be built"):
        bundle_pair(tmp_path, BuildOptions(overwrite=True, quantization=wanted))
    arch = find_arch("sm_120", TENSORRT)
    engines = EngineOptions(arch, Precision.BFLOAT16, TENSORRT, plugins=True)
    for form in ({"page_size": 16}, {"cache_dtype": CacheDtype.FP8}):
        with pytest.raises(DflashError, match="engines with paged or FP8 caches cannot be built"):
            bundle_pair(tmp_path, BuildOptions(overwrite=True, engines=engines, **form))
    with pytest.raises(DflashError, match="of whose chain nothing can be changed yet"):
        diagnose(pair.bundle, [], mock.Mock(), SilentProgress())
    with pytest.raises(DflashError, match="a layout that training does not know"):
        shape_of(pair.pair.draft, 192, 6)

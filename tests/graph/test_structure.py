"""The .onnx files themselves, as the full check and onnx's own tools take them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from safetensors.torch import load_file, save_file

from dflash_trt.building.spec import BuildSpec
from dflash_trt.graph import rope_tables as tables
from dflash_trt.graph import target
from dflash_trt.graph.bindings import GRAPH_NAMES, GraphName
from dflash_trt.models.safetensors_header import read_header
from tests.covering import exhaustive
from tests.graph.runner import GraphRunner
from tests.graph.variants import VARIANTS
from tests.pairs import PairFactory, TinyPair, bundle_pair
from tests.reference.checkpoints import write_draft, write_target


def load(built: TinyPair, graph: GraphName) -> onnx.ModelProto:
    """The file as it is, weights not loaded."""
    return onnx.load(built.bundle.folder / f"{graph}.onnx", load_external_data=False)


@pytest.mark.parametrize("graph", GRAPH_NAMES)
@pytest.mark.parametrize("name", ["qwen3_moe-float32", *map(exhaustive, list(VARIANTS)[::7])])
def test_onnxs_own_tools_open_a_bundle_of_copied_weights(
    make_pair: PairFactory, name: str, graph: GraphName
) -> None:
    family, target, draft = VARIANTS[name]
    built = make_pair(family, target, draft, copy_weights=True)
    path = built.bundle.folder / f"{graph}.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    loaded = onnx.load(path)
    assert all(t.raw_data or t.int64_data or t.float_data for t in loaded.graph.initializer)
    for tensor, reference in zip(
        loaded.graph.initializer, load(built, graph).graph.initializer, strict=True
    ):
        if reference.data_location == TensorProto.EXTERNAL:
            place = {e.key: e.value for e in reference.external_data}
            begin, length = int(place["offset"]), int(place["length"])
            data = (path.parent / place["location"]).read_bytes()[begin : begin + length]
            assert tensor.raw_data == data, tensor.name


TABLE_IDS = np.random.default_rng(0).integers(2, 190, (1, 40))


def _run(built: TinyPair) -> list[dict[str, np.ndarray]]:
    runner = GraphRunner(built)
    return [runner.target(TABLE_IDS, [0]), runner.draft([5], [40], 8)]


def test_scaled_tables_may_be_made_in_the_graph(
    make_pair: PairFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of another size than a power of four, 1/sqrt(D) rounds.
    keywords = {"head_dim": 24, "vocab": 192}
    stored = make_pair("qwen3", {**keywords, "seed": 7})
    monkeypatch.setattr(tables, "MAX_STORED_SCALED", 100)
    made = make_pair("qwen3", {**keywords, "seed": 7}, max_batch=3)
    sizes = [
        (one.bundle.folder / "weights" / "tables.safetensors").stat().st_size
        for one in (stored, made)
    ]
    assert sizes[0] > 1.9 * sizes[1]
    for before, after in zip(_run(stored), _run(made), strict=True):
        for name, values in before.items():
            np.testing.assert_array_equal(after[name], values, name)


def test_columns_that_do_not_turn_are_added_in_the_graph(
    make_pair: PairFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a Gemma 4's layers that see everything a quarter of the pairs turns."""
    keywords = {"vocab": 192, "tie": True}
    trimmed = make_pair("gemma4", {**keywords, "seed": 7})
    for module in (tables, target):
        monkeypatch.setattr(module, "still_columns", lambda spec: 0)
    whole = make_pair("gemma4", {**keywords, "seed": 7}, max_batch=3)
    stored = [
        read_header(one.bundle.folder / "weights" / "tables.safetensors")["rope.target.cos"]
        for one in (trimmed, whole)
    ]
    assert [one.shape[1] for one in stored] == [4, 16]
    for before, after in zip(_run(trimmed), _run(whole), strict=True):
        for name, values in before.items():
            np.testing.assert_array_equal(after[name], values, name)


def test_experts_that_no_row_chose_are_not_touched(tmp_path: Path) -> None:
    """Their weights are NaN, which any product would spread."""
    target = write_target(tmp_path / "target", "gpt_oss", num_layers=4, chosen=2)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("router.bias"):
            tensor[[1, 6]] += 1e4
        if ".experts." in name:
            tensor[[0, 2, 3, 4, 5, 7]] = torch.nan
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    write_draft(tmp_path / "draft", target, target_layer_ids=[1, 2])
    built = bundle_pair(tmp_path, BuildSpec())
    ids = np.random.default_rng(0).integers(0, 200, (2, 20))
    assert np.isfinite(GraphRunner(built, batch=2).target(ids, [0, 0])["logits"]).all()


def test_experts_of_several_types_are_one_mixture(tmp_path: Path) -> None:
    """Pieces of two types are decoded before they are put together."""
    logits = []
    for name, kind in (("one", torch.float32), ("two", torch.bfloat16)):
        folder = tmp_path / name
        target = write_target(folder / "target", "qwen3_moe", dtype="bfloat16", num_layers=4)
        tensors = load_file(target / "model.safetensors")
        for key in [key for key in tensors if ".experts.3." in key]:
            tensors[key] = tensors[key].to(kind)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        write_draft(folder / "draft", target, target_layer_ids=[1, 2])
        ids = np.random.default_rng(0).integers(0, 200, (1, 20))
        built = bundle_pair(folder, BuildSpec())
        logits.append(GraphRunner(built).target(ids, [0])["logits"])
    np.testing.assert_array_equal(*logits)

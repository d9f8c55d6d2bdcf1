"""Mixtures of experts and attention sinks: what each form computes, touches and refers to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from dflash_plugins.block_attention.reference import masked_error_bound
from dflash_plugins.testing.numeric import assert_close
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file, save_file

from dflash_trt.building.bundle_writer import BuildOptions
from dflash_trt.graph.caches.cpu import sink_attention_function
from dflash_trt.graph.form import GraphForm, Precision
from dflash_trt.models.safetensors_header import read_header
from tests.graph.builds import build
from tests.graph.functions import attend, run_function
from tests.graph.runner import GraphRunner, tokens
from tests.pairs import PairFactory, TinyPair, bundle_pair
from tests.reference.checkpoints import write_draft, write_target
from tests.reference.compare import max_relative_error, stack_error

PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", {"rope": "yarn", "dtype": "bfloat16", "num_layers": 4}),
    "gpt_oss_mxfp4": ("gpt_oss", {"rope": "yarn", "mxfp4": True, "chosen": 2, "num_layers": 4}),
    "qwen3_moe": ("qwen3_moe", {"dtype": "float16", "num_layers": 4}),
}
CHUNKS = ((0, 40), (40, 100), (100, 108), (108, 110))
LENGTH = 144


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """A float16 graph with float32 wherever it says float16: the form, without its rounding."""

    def widen_tensor(tensor: TensorProto) -> None:
        if tensor.data_type == TensorProto.FLOAT16 and not tensor.external_data:
            wide = numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32))
            wide.name = tensor.name
            tensor.CopyFrom(wide)

    for tensor in model.graph.initializer:
        widen_tensor(tensor)
    for value in [*model.graph.input, *model.graph.output]:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for node in [*model.graph.node, *(node for f in model.functions for node in f.node)]:
        for attribute in node.attribute:
            if attribute.name == "value":
                widen_tensor(attribute.t)
            if node.op_type == "Cast" and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.FLOAT
    return model


@pytest.mark.numeric
@pytest.mark.parametrize("name", PAIRS)
def test_the_engines_form_computes_the_cpus_function(make_pair: PairFactory, name: str) -> None:
    """Gathered experts and sinks among the cache's rows, past the window: exact but for order."""
    family, target = PAIRS[name]
    built = make_pair(family, target, {"target_layer_ids": [1, 3]}, copy_weights=True)
    # Rounded to float16, inputs would differ; and weights stored so would be left as they are.
    model = widened(build(built, "target", GraphForm(Precision.FLOAT16, LENGTH)))
    if family == "qwen3_moe":
        _widen_stored(model)
    ids = tokens(200, 2, 110)
    runners = (
        GraphRunner(built, batch=2, length=LENGTH, models=models)
        for models in ({"target": model}, None)
    )
    narrow, exact = (
        np.concatenate([runner.target(ids[:, s:e], [s, s])["logits"] for s, e in CHUNKS], axis=1)
        for runner in runners
    )
    assert max_relative_error(narrow, exact) <= stack_error(4)


def _widen_stored(model: onnx.ModelProto) -> None:
    """Casts every weight that is stored in float16."""
    casts = []
    for tensor in model.graph.initializer:
        if tensor.external_data and tensor.data_type == TensorProto.FLOAT16:
            for node in model.graph.node:
                node.input[:] = [f"{tensor.name}_f" if n == tensor.name else n for n in node.input]
            casts.append(
                helper.make_node("Cast", [tensor.name], [f"{tensor.name}_f"], to=TensorProto.FLOAT)
            )
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def test_sinks_are_one_more_term_of_the_softmax() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.standard_normal(shape, dtype=np.float32)
        for shape in ((2, 4, 3, 16), (2, 2, 128, 16), (2, 2, 128, 16))
    )
    sinks = np.array([-30.0, 0.5, 3.0, 80.0], np.float32)
    mask = rng.random((2, 1, 3, 128)) < 0.3
    feeds = {"q": q, "k": k, "v": v, "mask": mask, "sinks": sinks}
    (got,) = run_function(sink_attention_function(16), feeds)
    want = attend(q, k, v, mask[:, 0], sinks)
    assert_close(got, want, masked_error_bound(q, k, v, mask[:, 0], want, sinks))


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
    built = bundle_pair(tmp_path, BuildOptions())
    ids = np.random.default_rng(0).integers(0, 200, (2, 20))
    assert np.isfinite(GraphRunner(built, batch=2).target(ids, [0, 0])["logits"]).all()


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_mxfp4"])
def test_stacked_experts_are_referenced_in_place(make_pair: PairFactory, name: str) -> None:
    built = make_pair(*PAIRS[name], {"target_layer_ids": [1, 3]}, copy_weights=True)
    header = read_header(built.folder / "target" / "model.safetensors")
    stored = _external(built)
    experts = {n: e for n, e in header.items() if ".experts." in n or n.endswith("sinks")}
    assert len(experts) >= 5 * 4
    places = {(entry.offset, entry.length) for entry in experts.values()}
    assert places <= set(stored.values())


@pytest.mark.parametrize("shards", [1, 4])
def test_separate_experts_are_one_tensor_where_they_lie_together(
    make_pair: PairFactory, shards: int
) -> None:
    target = {"num_layers": 4, "shards": shards}
    built = make_pair("qwen3_moe", target, {"target_layer_ids": [1, 3]}, copy_weights=True)
    banks = [name for name in _external(built) if ".rows_" in name]
    assert len(banks) == 4 if shards == 1 else 4 < len(banks) <= 4 + shards
    model = onnx.load(built.bundle.folder / "target.onnx", load_external_data=False)
    joined = [node for node in model.graph.node if node.name.endswith("experts/rows")]
    assert bool(joined) == (shards > 1)


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
        built = bundle_pair(folder, BuildOptions())
        logits.append(GraphRunner(built).target(ids, [0])["logits"])
    np.testing.assert_array_equal(*logits)


def _external(built: TinyPair) -> Mapping[str, tuple[int, int]]:
    """(offset, length) of the target graph's external initializers."""
    model = onnx.load(built.bundle.folder / "target.onnx", load_external_data=False)
    places = {}
    for tensor in model.graph.initializer:
        data = {item.key: item.value for item in tensor.external_data}
        if data:
            places[tensor.name] = int(data["offset"]), int(data["length"])
    return places

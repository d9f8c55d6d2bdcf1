"""What a reader, a checker and an executor find in the .onnx files themselves."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
import pytest
from onnx import TensorProto

from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES, GraphName
from dflash_trt.graph.check import check_graph
from tests.graph.variants import VARIANTS, build
from tests.pairs import PairFactory, TinyPair

PAIRS: dict[str, Callable[[PairFactory], TinyPair]] = {
    "qwen3": lambda make_pair: make_pair(),
    "llama_narrow_tied_sharded": lambda make_pair: make_pair(
        "llama",
        {"dtype": "bfloat16", "tie": True, "attention_bias": True, "shards": 3, "rope": "llama3"},
        {"dtype": "float16", "num_layers": 3},
    ),
    "sliding": lambda make_pair: make_pair(
        "qwen3",
        None,
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    ),
}
STORED = {"F32": TensorProto.FLOAT, "F16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16}


@pytest.fixture(params=list(PAIRS))
def built(request: pytest.FixtureRequest, make_pair: PairFactory) -> TinyPair:
    return PAIRS[request.param](make_pair)


@pytest.fixture(params=list(GRAPH_NAMES))
def graph(request: pytest.FixtureRequest) -> GraphName:
    name: GraphName = request.param
    return name


def load(built: TinyPair, graph: GraphName) -> onnx.ModelProto:
    """The file as it is, weights not loaded."""
    return onnx.load(built.bundle.folder / f"{graph}.onnx", load_external_data=False)


def header(path: Path) -> tuple[int, dict[str, Any]]:
    """A .safetensors file's first data byte and its header, read with nothing but struct."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    entries: dict[str, Any] = json.loads(raw[8 : 8 + length])
    return 8 + length, entries


def test_only_standard_operators_and_local_functions_appear(
    built: TinyPair, graph: GraphName
) -> None:
    model = load(built, graph)
    assert model.graph.name == graph
    assert {i.domain: i.version for i in model.opset_import}[""] == 24
    defined = {(f.domain, f.name, f.overload) for f in model.functions}
    called = {(n.domain, n.op_type, n.overload) for n in model.graph.node if n.domain}
    assert called == defined, "every function that is called is defined, and no other"
    assert {(domain, name) for domain, name, _ in defined} == {
        ("trt", "TRT_Attention"),
        ("dflash", "swiglu"),
    } | ({("dflash", "kv_feature_injection")} if graph == "target" else set())
    for function in model.functions:
        assert {i.domain: i.version for i in function.opset_import} == {"": 24}
        assert len(function.node) > 1
    standard = {n.op_type for n in model.graph.node if not n.domain}
    assert "Attention" not in standard, "attention goes through its function"


def test_every_cache_is_updated_exactly_once(built: TinyPair, graph: GraphName) -> None:
    model = onnx.inliner.inline_local_functions(load(built, graph))
    assert not model.functions
    updates = [n for n in model.graph.node if n.op_type == "TensorScatter"]
    caches = [i.name for i in model.graph.input if i.name.startswith(("target_", "draft_"))]
    layers = {"target": built.pair.target.num_layers, "draft": built.pair.draft.num_layers}
    owners = ["target", "draft"] if graph == "target" else [graph.removesuffix("_only")]
    expected = [
        f"{owner}_{kv}_{layer}" for owner in owners for layer in range(layers[owner]) for kv in "kv"
    ]
    assert caches == expected
    assert Counter(n.input[0] for n in updates) == Counter(expected)
    assert {n.input[0]: n.output[0] for n in updates} == {c: f"{c}_out" for c in expected}
    # Attention reads the updated cache, never the one before: an executor aliases the two.
    readers = Counter(
        node.op_type for node in model.graph.node for name in node.input if name in caches
    )
    assert set(readers) <= {"TensorScatter", "Shape"}
    outputs = [o.name for o in model.graph.output]
    assert [n for n in outputs if n.endswith("_out")] == [f"{c}_out" for c in expected]


def test_names_lead_to_the_layer(built: TinyPair, graph: GraphName) -> None:
    model = load(built, graph)
    pair, is_draft = built.pair, graph == "draft"
    layers = (pair.draft if is_draft else pair.target).num_layers
    prefix = "draft_layers" if is_draft else "layers"
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names), "node names are unique"
    assert all(names)
    outputs = {name for node in model.graph.node for name in node.output}
    for layer in range(layers):
        for part in ("attention/q_proj", "attention/attend", "mlp/swiglu", "mlp/down_proj"):
            assert f"{prefix}.{layer}/{part}" in names
            assert f"{prefix}.{layer}/{part}" in outputs
        assert f"{prefix}.{layer}/attention/k_cache_update" in names
    if graph == "target":
        for layer in range(built.pair.draft.num_layers):
            assert f"injection/draft_layers.{layer}/inject" in names


def test_weights_are_referenced_where_the_safetensors_header_says(
    built: TinyPair, graph: GraphName
) -> None:
    model = load(built, graph)
    folder = built.bundle.folder
    external = 0
    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            assert len(tensor.SerializeToString()) < 200, f"{tensor.name} is inside the .onnx"
            continue
        external += 1
        reference = {e.key: e.value for e in tensor.external_data}
        path = folder / reference["location"]
        assert path.suffix == ".safetensors"
        assert path.is_file()
        first, entries = header(path)
        spans = {
            (str(first + e["data_offsets"][0]), str(e["data_offsets"][1] - e["data_offsets"][0])): e
            for name, e in entries.items()
            if name != "__metadata__"
        }
        entry = spans[reference["offset"], reference["length"]]
        assert list(tensor.dims) == entry["shape"]
        assert tensor.data_type == STORED[entry["dtype"]]
    assert external > 0


def test_every_stored_weight_is_used_by_some_graph(built: TinyPair) -> None:
    used = {
        tuple(e.value for e in tensor.external_data)
        for graph in GRAPH_NAMES
        for tensor in load(built, graph).graph.initializer
    }
    for folder in ("target", "draft"):
        for path in sorted((built.bundle.folder / "weights" / folder).glob("*.safetensors")):
            first, entries = header(path)
            location = path.relative_to(built.bundle.folder).as_posix()
            for name, entry in entries.items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    assert (location, str(first + begin), str(end - begin)) in used, name


def test_the_full_check_notices_a_wrong_shape(built: TinyPair) -> None:
    model = load(built, "target")
    norm = next(t for t in model.graph.initializer if t.name.endswith("layers.0.down_proj"))
    norm.dims[1] += 1
    with pytest.raises(DflashError, match=r"target\.onnx: the built graph does not pass") as caught:
        check_graph(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", list(VARIANTS)[::7])
def test_onnxs_own_tools_open_a_bundle_of_copied_weights(
    make_pair: PairFactory, name: str, graph: GraphName
) -> None:
    family, target, draft = VARIANTS[name]
    built = make_pair(family, target, draft, copy_weights=True)
    path = built.bundle.folder / f"{graph}.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    loaded = onnx.load(path)
    assert all(t.raw_data or t.int64_data for t in loaded.graph.initializer)
    for tensor, reference in zip(
        loaded.graph.initializer, load(built, graph).graph.initializer, strict=True
    ):
        if reference.data_location == TensorProto.EXTERNAL:
            place = {e.key: e.value for e in reference.external_data}
            begin, length = int(place["offset"]), int(place["length"])
            data = (path.parent / place["location"]).read_bytes()[begin : begin + length]
            assert tensor.raw_data == data, tensor.name


@pytest.mark.parametrize("name", list(VARIANTS)[::5])
def test_two_builds_of_one_pair_are_equal(make_pair: PairFactory, name: str) -> None:
    family, target, draft = VARIANTS[name]
    first = build(make_pair, name).bundle.folder
    second = make_pair(family, target, draft, max_batch=3).bundle.folder
    for graph in GRAPH_NAMES:
        file = f"{graph}.onnx"
        assert (first / file).read_bytes() == (second / file).read_bytes(), file

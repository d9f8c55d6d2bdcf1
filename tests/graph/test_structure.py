"""What a reader, a checker and an executor find in the .onnx files themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

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

"""The form of a graph: the CPU's stays as it is, the narrow ones compute the same function."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from dflash_trt.backends.onnxruntime.executor import open_session
from dflash_trt.graph.bindings import GRAPH_NAMES, GraphName
from dflash_trt.graph.check import check_graph
from dflash_trt.graph.form import CPU_FORM, GraphForm, Precision
from tests.graph.builds import PAIRS, build
from tests.pairs import PairFactory, TinyPair

pytestmark = pytest.mark.numeric

# sha256 of the CPU's graphs, file offsets and version left out: what runs on the CPU changes
# on purpose only. Recorded before graphs had any other form.
GOLDEN = {
    "qwen3/target": "e41edba04c2fdb5122c5731c3e5906d9dc8100f79c0c154c545a034f2af65b01",
    "qwen3/draft": "1dd2803dd99bc3d50add22a66037d0f911029eb4d0184d19a98f939f61c91571",
    "qwen3/target_only": "0bcc35a91d9f5664a0a7e81ffb3a14f2b6d97ad5c2654c730335853bb9fdb858",
    "llama_tied/target": "9d2fed50a9746cbb6b6c5329b4ad84a89a896c4a16856e6c5bb2bc92d64641c0",
    "llama_tied/draft": "f91b84b95b8d225a5cdc7fd84391cc68ec0c2d6a054b55029f09dab6e7f23d1d",
    "llama_tied/target_only": "3361345bc7af80c6f44f14631ee74fc6a9ef10968e68b127536504905b039eca",
}


@pytest.fixture(params=list(PAIRS))
def built(request: pytest.FixtureRequest, make_pair: PairFactory) -> TinyPair:
    return PAIRS[request.param](make_pair)


@pytest.mark.parametrize("name", list(PAIRS))
def test_the_cpus_graphs_do_not_change(make_pair: PairFactory, name: str) -> None:
    built = PAIRS[name](make_pair)
    for graph in GRAPH_NAMES:
        model = onnx.load(built.bundle.folder / f"{graph}.onnx", load_external_data=False)
        model.producer_version = ""
        for tensor in model.graph.initializer:
            del tensor.external_data[:]
        digest = hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
        assert digest == GOLDEN[f"{name}/{graph}"], graph


@pytest.mark.parametrize("graph", GRAPH_NAMES)
def test_the_default_form_is_the_cpus(built: TinyPair, graph: GraphName) -> None:
    written = (built.bundle.folder / f"{graph}.onnx").read_bytes()
    assert build(built, graph, CPU_FORM).SerializeToString(deterministic=True) == written


@pytest.mark.parametrize("precision", [Precision.FLOAT16, Precision.BFLOAT16])
@pytest.mark.parametrize("graph", GRAPH_NAMES)
def test_types_of_a_narrow_graph(built: TinyPair, graph: GraphName, precision: Precision) -> None:
    model = build(built, graph, GraphForm(precision, cache_length=384))
    check_graph(model)
    values = {v.name: v.type.tensor_type for v in [*model.graph.input, *model.graph.output]}
    caches = [v for name, v in values.items() if "_k_" in name or "_v_" in name]
    assert caches and {v.elem_type for v in caches} == {precision.onnx_type}
    assert {v.shape.dim[2].dim_value for v in caches} == {384}
    if graph != "draft":
        assert values["logits"].elem_type == TensorProto.FLOAT
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    types = {v.name: v.type.tensor_type.elem_type for v in inferred.graph.value_info}
    norms = [n for n in model.graph.node if n.op_type == "RMSNormalization"]
    assert norms and {types[n.output[0]] for n in norms} == {TensorProto.FLOAT}
    wide = {n.name for n in model.graph.node if n.op_type == "Gemm"} & {
        name for name, kind in types.items() if kind == TensorProto.FLOAT
    }
    assert wide == ({"injection/fc"} if graph == "target" else set())


def test_float16_computes_the_same_function(built: TinyPair, tmp_path: Path) -> None:
    """ONNX Runtime has float16 kernels on the CPU (bfloat16 it has not)."""
    narrow = build(built, "target", GraphForm(Precision.FLOAT16, cache_length=128))
    path = built.bundle.folder / f"{tmp_path.name}.onnx"  # external data lies beside it
    path.write_bytes(narrow.SerializeToString())
    ids = np.random.default_rng(0).integers(0, 200, (2, 40))
    results = []
    for file, kind in ((built.bundle.folder / "target.onnx", np.float32), (path, np.float16)):
        session = open_session(file, 1)
        feeds = {
            "token_ids": ids,
            "cache_start": np.zeros(2, np.int64),
            "logit_rows": np.tile(np.arange(40), (2, 1)),
        }
        for value in session.get_inputs()[3:]:
            feeds[value.name] = np.zeros((2, value.shape[1], 128, value.shape[3]), kind)
        names = [value.name for value in session.get_outputs()]
        results.append(dict(zip(names, session.run(None, feeds), strict=True)))
    path.unlink()
    exact, half = results
    for name, want in exact.items():
        if name != "choice_ids":
            got = half[name].astype(np.float32)
            assert np.abs(got - want).max() <= 0.02 * np.abs(want).max(), name
    agree = half["choice_ids"] == exact["choice_ids"]
    top = np.sort(exact["logits"], axis=2)
    assert agree[top[..., -1] - top[..., -2] > 0.02 * np.abs(top).max()].all()


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("graph", GRAPH_NAMES)
def test_observation_adds_outputs_and_nothing_else(
    built: TinyPair, graph: GraphName, precision: Precision
) -> None:
    plain, seen = (build(built, graph, GraphForm(precision, 384, observe=o)) for o in (False, True))
    check_graph(seen)
    added = [node for node in seen.graph.node if node.op_type == "amax"]
    rest = [node for node in seen.graph.node if node.op_type not in ("amax", "Cast")]
    assert rest == [node for node in plain.graph.node if node.op_type != "Cast"]
    assert list(seen.graph.output)[: len(plain.graph.output)] == list(plain.graph.output)
    outputs = list(seen.graph.output)[len(plain.graph.output) :]
    assert [value.name for value in outputs] == [node.output[0] for node in added]
    assert {value.type.tensor_type.elem_type for value in outputs} == {TensorProto.FLOAT}
    readers = {item.key: item.value for item in seen.metadata_props}
    assert set(readers.values()) == {value.name for value in outputs}
    products = [node for node in plain.graph.node if node.op_type == "Gemm"]
    weights = {node.input[1].removesuffix(f".{precision.value}") for node in products}
    assert {weight.removesuffix(".float32") for weight in weights} == set(readers)
    assert len(outputs) < len(readers) and not plain.metadata_props

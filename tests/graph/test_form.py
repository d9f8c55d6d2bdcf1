"""The form of a graph: narrow ones compute the CPU's function. tests/frozen has all hashes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from dflash_trt.graph.bindings import GRAPH_NAMES, GraphName
from dflash_trt.graph.check import check_graph
from dflash_trt.graph.form import CPU_FORM, GraphForm, Precision
from tests.graph.builds import PAIRS, build
from tests.graph.runner import GraphRunner, tokens
from tests.pairs import PairFactory, TinyPair

pytestmark = pytest.mark.numeric


@pytest.fixture(params=list(PAIRS))
def built(request: pytest.FixtureRequest, make_pair: PairFactory) -> TinyPair:
    return PAIRS[request.param](make_pair)


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


def test_float16_computes_the_same_function(built: TinyPair) -> None:
    """ONNX Runtime has float16 kernels on the CPU (bfloat16 it has not)."""
    narrow = build(built, "target", GraphForm(Precision.FLOAT16, cache_length=128))
    ids = tokens(200, 2, 40)
    runners = GraphRunner(built, batch=2), GraphRunner(built, batch=2, models={"target": narrow})
    exact, half = (runner.target(ids, [0, 0]) for runner in runners)
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

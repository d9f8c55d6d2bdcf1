"""Networks of TensorRT's own parser that are not what the graph asked for are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import helper

from dflash_trt.backends.tensorrt.build.network import check_network, summarize_network
from dflash_trt.backends.tensorrt.library import make_logger
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GraphName
from dflash_trt.graph.form import GraphForm, Precision
from tests.graph.runner import build
from tests.pairs import TWO_KINDS, PairFactory, TinyPair

trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX (the rtx extra) is not installed")

FORM = GraphForm(Precision.BFLOAT16, cache_length=256)


@pytest.fixture(scope="module")
def built(make_pair: PairFactory) -> TinyPair:
    draft = {"target_layer_ids": [0, 1], **TWO_KINDS}
    return make_pair(target={"num_layers": 2, "head_dim": 64}, draft=draft, copy_weights=True)


def check_parsed(built: TinyPair, asked: onnx.ModelProto, parsed: onnx.ModelProto) -> None:
    """Holds what the parser makes of `parsed` to `asked`."""
    logger = make_logger(trt)
    strong = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = trt.Builder(logger).create_network(strong)
    path: Path = built.bundle.folder / "parsed.onnx"
    assert trt.OnnxParser(network, logger).parse(parsed.SerializeToString(), str(path))
    check_network(asked, summarize_network(trt, network))


def add_values(model: onnx.ModelProto) -> None:
    """What a graph might give its attention in place of its own: lengths, a mask, no such name."""
    graph = model.graph
    lengths = helper.make_node("Cast", ["cache_start"], ["lengths"], to=onnx.TensorProto.INT32)
    graph.node.insert(0, lengths)
    attention = next(node for node in graph.node if node.op_type == "TRT_Attention")
    graph.node.insert(
        list(graph.node).index(attention),
        helper.make_node("Not", [attention.input[3]], ["anything"]),
    )
    for function in model.functions:
        if function.name == "TRT_Attention":
            unknown = onnx.FunctionProto()
            unknown.CopyFrom(function)
            unknown.name = "unknown"
            model.functions.append(unknown)


def _give_lengths(node: onnx.NodeProto) -> None:
    node.input.extend(["", "lengths"])


def _drop_mask(node: onnx.NodeProto) -> None:
    node.input[3] = ""


def _widen_mask(node: onnx.NodeProto) -> None:
    node.input[3] = "anything"


def _take_the_body(node: onnx.NodeProto) -> None:
    """What a parser that does not know `TRT_Attention` reads in its place."""
    node.op_type = "unknown"


CHANGES: list[tuple[GraphName, Callable[[onnx.NodeProto], None] | None, str]] = [
    ("target", None, ""),
    ("draft", None, ""),
    (
        "target_only",
        _give_lengths,
        "lengths in layers.0/attention/attend, layers.1/attention/attend",
    ),
    ("draft", _give_lengths, "lengths in draft_layers.0/attention/attend, draft_layers.1"),
    ("target", _drop_mask, "another mask in layers.0/attention/attend, layers.1/attention/attend"),
    ("draft", _widen_mask, "another mask in draft_layers.0/attention/attend, draft_layers.1"),
    ("target", _take_the_body, "no native attention for layers.0/attention/attend"),
    ("draft", _take_the_body, "no native attention for draft_layers.0/attention/attend"),
]


@pytest.mark.parametrize(("graph", "change", "what"), CHANGES)
def test_attention_is_that_of_the_graph(
    built: TinyPair, graph: GraphName, change: Callable[[onnx.NodeProto], None] | None, what: str
) -> None:
    asked, parsed = build(built, graph, FORM), onnx.ModelProto()
    parsed.CopyFrom(asked)
    if change is None:
        check_parsed(built, asked, parsed)
        return
    add_values(parsed)
    for node in parsed.graph.node:
        if node.op_type == "TRT_Attention":
            change(node)
    with pytest.raises(DflashError) as caught:
        check_parsed(built, asked, parsed)
    assert what in caught.value.message


@pytest.mark.parametrize(
    ("change", "what"),
    [(_give_lengths, "key/value lengths in"), (_drop_mask, "another mask in")],
)
def test_a_graph_that_asks_for_it_is_refused_as_well(
    built: TinyPair, change: Callable[[onnx.NodeProto], None], what: str
) -> None:
    """It is not enough that the network is what the graph says."""
    asked = build(built, "target_only", FORM)
    add_values(asked)
    for node in asked.graph.node:
        if node.op_type == "TRT_Attention":
            change(node)
    with pytest.raises(DflashError, match=rf"{what} layers\.0/attention/attend"):
        check_parsed(built, asked, asked)

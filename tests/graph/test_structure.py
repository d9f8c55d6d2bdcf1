"""The .onnx files themselves, as the full check and onnx's own tools take them."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto

from dflash_trt.graph.bindings import GRAPH_NAMES, GraphName
from tests.covering import exhaustive
from tests.graph.variants import VARIANTS
from tests.pairs import PairFactory, TinyPair


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

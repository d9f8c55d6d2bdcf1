"""Graphs that draw, built by TensorRT-RTX with a stand-in for the one body that it cannot take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import onnx.parser
import pytest

from dflash_trt.backends.tensorrt.build.builder import EngineOptions, build_engine
from dflash_trt.backends.tensorrt.library import find_arch
from dflash_trt.core.limits import Limits
from dflash_trt.graph.bindings import GraphName
from dflash_trt.graph.form import GraphForm, Precision
from tests.backends.tensorrt.build.conftest import RecordedProgress
from tests.covering import exhaustive
from tests.graph.builds import build
from tests.pairs import PairFactory

LIMITS = Limits(max_batch=2, max_seq_len=256, block_size=8, prefill_chunk=64)
# float64 is what TensorRT has not: any choice of the same type and shape will do here.
STAND_IN = """
<domain: "dflash", opset_import: ["" : 24]>
row_sample (logits, positions, sampling) => (token_ids)
{
    greedy = ArgMax <axis = 2, keepdims = 0> (logits)
    first = Constant <value_ints = [0]> ()
    seeds = Gather <axis = 1> (sampling, first)
    moved = Sub (positions, seeds)
    zero = Sub (moved, moved)
    token_ids = Add (greedy, zero)
}
"""


@pytest.mark.parametrize("graph", [exhaustive("target"), "target_only"])
def test_all_around_the_kernels_builds(
    make_pair: PairFactory, tmp_path: Path, graph: GraphName
) -> None:
    """`accept` by its body, for integers are integers; what an engine takes and gives is there."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX (the rtx extra) is not installed")
    built = make_pair(
        target={"num_layers": 2, "head_dim": 64},
        draft={"target_layer_ids": [0, 1]},
        copy_weights=True,
    )
    model = build(built, graph, GraphForm(Precision.BFLOAT16, LIMITS.max_seq_len, draws=True))
    functions = [one for one in model.functions if one.name != "row_sample"]
    assert len(functions) < len(model.functions)
    del model.functions[:]
    model.functions.extend([*functions, onnx.parser.parse_function(STAND_IN)])
    folder = shutil.copytree(built.bundle.folder, tmp_path / "bundle")
    (folder / f"{graph}.onnx").write_bytes(model.SerializeToString())
    options = EngineOptions(find_arch("sm_120"), Precision.BFLOAT16)
    length = LIMITS.max_seq_len
    engine = build_engine(graph, folder, options, LIMITS, length, RecordedProgress())
    summary = json.loads((folder / engine.summary).read_text())
    held = (*summary["inputs"], *summary["outputs"])
    tensors = {one["name"]: (one["dtype"], one["shape"]) for one in held}
    assert tensors["sampling"] == ("INT64", ["B", 4])
    assert tensors["choice_ids"][0] == "INT64" and len(tensors["choice_ids"][1]) == 2
    assert "candidate_ids" not in tensors
    settled = {"accepted": "INT32", "new_tokens": "INT64", "new_start": "INT64"}
    settled |= {"next_block_ids": "INT64"}
    if graph == "target":
        assert {name: tensors[name][0] for name in settled} == settled
    else:
        assert not settled.keys() & tensors.keys()

"""`build --plugins` with paged and FP8 caches, against stand-ins of TensorRT's parser and registry.

The parser is TensorRT-RTX's own, so that inputs and outputs of these types are known to be read;
kernels and engines have not run on a GPU.
"""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX (the rtx extra) is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-python (the rtx extra) is not installed")
pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")

from dflash_plugins.table import operations

from tests.cli.conftest import Build, Run, split_short_caches, write_config
from tests.pairs import TWO_KINDS, PairFactory
from tests.standins.plugin_tensorrt import FULL, PluginTensorRt

PAGED = ["--kv-layout", "paged", "--page-size", "16", "--kv-pages", "9"]
FP8 = ["--kv-dtype", "fp8"]
CACHES = {"paged": PAGED, "fp8": FP8, "paged_fp8": [*PAGED, *FP8]}
LIMITS = {"max_batch": 2, "max_seq_len": 64}
ELSEWHERE = {"swiglu", "moe", "row_groups", "row_sample", "accept"}
"""Operations that touch no cache."""
SEEN = {
    ("qwen3", "target"): [(1, 0)] * 3,
    ("qwen3", "draft"): [(1, 24), (0, 0)],
    ("gpt_oss", "target"): [(1, 24), (1, 0)],
    ("gpt_oss", "draft"): [(0, 0)],
}
"""Causality and window of each layer's attention."""
PAIRS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "target": {"head_dim": 64, "num_layers": 3, "vocab": 97},
        "draft": {"head_dim": 64, "num_layers": 2, "target_layer_ids": [0, 2], **TWO_KINDS},
    },
    "gpt_oss": {
        "family": "gpt_oss",
        "target": {"head_dim": 64, "num_layers": 2, "vocab": 97, "mxfp4": True, "hidden": 64},
        "draft": {"head_dim": 64, "num_layers": 1, "target_layer_ids": [0, 1]},
    },
}


@pytest.mark.parametrize(
    ("pair", "caches", "is_long"),
    [
        ("qwen3", "paged", False),
        ("qwen3", "fp8", True),
        ("gpt_oss", "paged_fp8", False),
        ("gpt_oss", "paged", True),
    ],
)
def test_kernels_are_all_that_touches_such_caches(
    run: Run,
    build: Build,
    make_pair: PairFactory,
    full: PluginTensorRt,
    monkeypatch: pytest.MonkeyPatch,
    pair: str,
    caches: str,
    is_long: bool,
) -> None:
    """In every graph, the prompt's chunks included; with windows and sinks."""
    if is_long:
        split_short_caches(monkeypatch, 16)
    config = write_config(make_pair(**PAIRS[pair]).folder, **LIMITS)
    build.well(config, *FULL, *CACHES[caches], "--plugins")
    manifest = build.manifest
    is_paged, is_fp8 = "paged" in caches, "fp8" in caches
    assert manifest["kv_dtype"] == ("fp8" if is_fp8 else "auto")
    assert manifest["page_pool"] == ({"page_size": 16, "pages": 9} if is_paged else None)
    length = manifest["engines"]["cache_length"]
    assert length == 112  # 100 positions: whole pages, or slots that are aligned
    graphs = {model.graph.name: model for model in full.handed}
    operations_of = {one["graph"]: one for one in manifest["engines"]["files"]}
    for name, model in graphs.items():
        assert not {"TRT_Attention", "sink_attention"} & {one.name for one in model.functions}
        assert not any(one.name.startswith(("block_", "kv_")) for one in model.functions)
        calls = [node for node in model.graph.node if node.domain == "dflash"]
        kinds = {node.op_type for node in calls} - ELSEWHERE
        wanted = {f"kv_cache_update_{caches}"}
        wanted |= {f"kv_feature_injection_{caches}"} if name == "target" else set()
        attention = {node for node in kinds if node.startswith("block_attention")}
        assert kinds - attention == wanted
        split = {f"block_attention_split_{caches}", "block_attention_merge"}
        assert attention <= split | {f"block_attention_{caches}"}
        assert split <= attention if is_long else not split & attention
        engine = operations_of[name]
        assert {engine["operations"][kind] for kind in kinds} == {"plugin"}
        assert (engine["fused_attentions"], engine["cache_updates"]) == (0, 0)
        updated = {one.name.removesuffix("_out") for one in model.graph.output}
        caches_of = updated & {one.name for one in model.graph.input}
        assert caches_of and set(engine["plugin_caches"]) == caches_of
        assert "TRT_Attention" not in str(engine["operations"])
        check_operands(model, calls, is_paged, is_fp8, length)
        attends = [
            {one.name: helper.get_attribute_value(one) for one in node.attribute}
            for node in calls
            if node.op_type.startswith("block_attention") and not node.op_type.endswith("merge")
        ]
        assert {one["block_size"] for one in attends} == {manifest["limits"]["block_size"]}
        seen = [(one["is_causal"], one["window"]) for one in attends]
        assert seen == SEEN[pair, name.removesuffix("_only")]
    assert f"kv_cache_update_{caches} plugin" in run("inspect", build.folder).out


def check_operands(
    model: onnx.ModelProto,
    calls: list[onnx.NodeProto],
    is_paged: bool,
    is_fp8: bool,
    length: int,
) -> None:
    """Every plugin gets its operands in order, and the caches are of the types that it takes."""
    values = {one.name: one.type.tensor_type for one in model.graph.input}
    fixed = {one.name: one for one in model.graph.initializer}
    for node in calls:
        operation = operations().get(node.op_type)
        if operation is None or node.op_type in {*ELSEWHERE, "block_attention_merge"}:
            continue
        given = dict(zip(operation.inputs, node.input, strict=True))
        for kv in ("k_cache", "v_cache"):
            name = given[kv].removesuffix("_out")
            shape = [dim.dim_value for dim in values[name].shape.dim]
            kind = TensorProto.FLOAT8E4M3FN if is_fp8 else TensorProto.BFLOAT16
            assert values[name].elem_type == kind and f"_{kv[0]}_" in name
            assert shape[:2] == [10, 16] if is_paged else shape[2] == length
        if is_paged:
            assert given["page_table"] == "page_table"
            assert values["page_table"].shape.dim[1].dim_value == length // 16
        if is_fp8:
            scales = fixed[given["kv_scales"]]
            assert list(onnx.numpy_helper.to_array(scales)) == [1.0, 1.0]
            assert scales.data_type == TensorProto.FLOAT
        if "positions" in given:
            assert given["positions"] == "rows/positions"

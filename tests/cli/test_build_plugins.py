"""`build --plugins`: what TensorRT is handed, against stand-ins of its parser and registry."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest
from onnx import helper

from dflash_trt.backends.tensorrt.build.plugins import hand_over, operation_forms, plugin_caches
from dflash_trt.graph.functions import DFLASH_DOMAIN
from dflash_trt.kernels import accept, attention
from tests.cli.bigram import write_bigram_pair
from tests.cli.conftest import Run, edit_manifest
from tests.standins.cuda import FakeCuda
from tests.standins.plugin_tensorrt import FULL, PluginTensorRt
from tests.standins.stub_builder import FullTensorRt

PER_CALL = {"row_sample", "accept"}


def test_tensorrt_is_handed_plugins_in_place_of_bodies(
    run: Run, engine_config: Path, tmp_path: Path, full: PluginTensorRt
) -> None:
    output = tmp_path / "bundle"
    run.well("build", "--target", engine_config, *FULL, "--plugins", "-o", output)
    assert full.plugin.plugins
    target, draft, target_only = full.handed
    calls = [node for node in target.graph.node if node.op_type == "kv_feature_injection"]
    assert calls and all(not node.overload for node in calls)
    for model, own in ((target, ["row_sample", "accept"]), (target_only, ["row_sample"])):
        found = [node.op_type for node in model.graph.node if node.op_type in PER_CALL]
        assert found == own
        assert not {one.name for one in model.functions} & PER_CALL
        assert "sampling" in {value.name for value in model.graph.input}
        assert "candidate_ids" not in {value.name for value in model.graph.output}
    assert not any(one.name == "kv_feature_injection" for one in target.functions)
    assert {one.name for one in draft.functions} == {"TRT_Attention", "swiglu"}
    # The bundle's own graph keeps the definition.
    stored = onnx.load(output / "target.onnx", load_external_data=False)
    assert any(one.name == "kv_feature_injection" for one in stored.functions)

    manifest = json.loads((output / "manifest.json").read_text())
    operations = {one["graph"]: one["operations"] for one in manifest["engines"]["files"]}
    assert operations["target"] == {
        "TRT_Attention_lower_right": "native",
        "accept": "plugin",
        "kv_feature_injection": "plugin",
        "row_sample": "plugin",
        "swiglu": "function",
    }
    assert "plugin" not in operations["draft"].values()
    text = run("inspect", output).out
    assert "kv_feature_injection plugin, row_sample plugin, swiglu function" in text
    assert manifest["engines"]["draws"]
    assert "tokens are drawn and accepted in the target's engine" in text
    assert run("inspect", output, "--json").json["engines"]["files"][0]["operations"]


@pytest.mark.parametrize("is_long", [False, True])
def test_the_drafts_blocks_attend_by_plugins(
    run: Run, tmp_path: Path, full: PluginTensorRt, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    """In one launch where the cache is short, in two where it is long; the target stays native."""
    if is_long:
        monkeypatch.setattr(attention, "RUN", 64)
    config = write_bigram_pair(tmp_path / "pair", head_dim=64)
    output = tmp_path / "bundle"
    run.well("build", "--target", config, *FULL, "--plugins", "-o", output)
    target, draft, _ = full.handed
    assert "TRT_Attention" in {node.op_type for node in target.graph.node}
    assert not {"TRT_Attention", "block_attention"} & {one.name for one in draft.functions}
    calls = ["block_attention_split", "block_attention_merge"] if is_long else ["block_attention"]
    found = [node.op_type for node in draft.graph.node if node.domain == DFLASH_DOMAIN]
    layers = sum(node.op_type == "swiglu" for node in draft.graph.node)
    assert [name for name in found if name != "swiglu"] == calls * layers
    files = {one["graph"]: one for one in run("inspect", output, "--json").json["engines"]["files"]}
    forms = dict.fromkeys(sorted(calls), "plugin") | {"swiglu": "function"}
    assert files["draft"]["operations"] == forms
    assert files["draft"]["fused_attentions"] == 0 < files["target"]["fused_attentions"]


@pytest.mark.usefixtures("full")
def test_without_the_option_bodies_stay(
    run: Run, engine_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", FullTensorRt())
    output = tmp_path / "bundle"
    run.well("build", "--target", engine_config, *FULL, "-o", output)
    text = run("inspect", output).out
    assert "kv_feature_injection function" in text
    assert "row_sample" not in text and "tokens are drawn" not in text


def test_what_plugins_need_is_asked_for_before_anything_is_written(
    run: Run,
    engine_config: Path,
    tmp_path: Path,
    full: PluginTensorRt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = ["build", "--target", engine_config, *FULL, "--plugins", "-o", tmp_path / "bundle"]
    monkeypatch.setattr("dflash_trt.hardware.device.load_cuda", lambda: FakeCuda((8, 9)))
    run(*build).fails(2, "--plugins: there are no kernels for sm_89", "sm_90, sm_100")
    monkeypatch.setattr("dflash_trt.hardware.device.load_cuda", lambda: FakeCuda())
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "triton", None)
        run(*build).fails(1, "Triton language is not installed", "dflash-trt[plugins]")
    assert not (tmp_path / "bundle").exists()
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", None)
    run(*build).fails(1, "--plugins: TensorRT does not load its plugin module")
    assert not (tmp_path / "bundle").exists()


def test_an_overload_is_part_of_a_plugins_name_and_absent_inputs_are_none() -> None:
    call = helper.make_node(
        "kv_feature_injection", ["k", "", "pool"], ["pool_out"], domain=DFLASH_DOMAIN
    )
    call.overload = "paged"
    value = helper.make_tensor_value_info("pool", onnx.TensorProto.FLOAT, [1])
    graph = helper.make_graph([call], "g", [value], [])
    function = helper.make_function(
        DFLASH_DOMAIN, "kv_feature_injection", [], [], [], [], overload="paged"
    )
    model = helper.make_model(graph, functions=[function])
    known = {"kv_feature_injection_paged"}
    (node,) = hand_over(model, known).graph.node
    assert (node.op_type, list(node.input), node.overload) == (*known, ["k", "pool"], "")
    assert model.graph.node[0].overload == "paged"
    assert plugin_caches(model, known) == ["pool"]
    assert operation_forms(hand_over(model, known), known) == {
        "kv_feature_injection_paged": "plugin"
    }
    assert not plugin_caches(model, {"kv_feature_injection"})


def test_manifests_from_before_drawing_and_such_that_contradict_themselves(
    run: Run, engine_config: Path, tmp_path: Path, full: PluginTensorRt
) -> None:
    output = tmp_path / "bundle"
    run.well("build", "--target", engine_config, *FULL, "--plugins", "-o", output)
    edit_manifest(output, lambda manifest: manifest.update(executor="tensorrt-rtx"))
    run("inspect", output).fails(1, "manifest.json", "engines that draw do not go with executor")
    edit_manifest(output, lambda manifest: manifest.update(executor="tensorrt"))
    edit_manifest(output, lambda manifest: manifest["engines"].pop("draws"))
    assert run("inspect", output, "--json").json["engines"]["draws"] is False


def test_a_block_that_no_step_settles_is_refused_before_anything_is_written(
    run: Run,
    engine_config: Path,
    tmp_path: Path,
    full: PluginTensorRt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accept, "MAX_ROWS", 4)
    build = ["build", "--target", engine_config, *FULL, "--plugins", "-o", tmp_path / "bundle"]
    run(*build).fails(2, "--plugins: a step settles at most 4 rows, not a block of", "--block-size")
    assert not (tmp_path / "bundle").exists()
    run.well(*build, "--block-size", "4")

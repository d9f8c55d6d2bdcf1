"""`build --plugins`: what TensorRT is handed, against stand-ins of its parser and registry."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import onnx
import pytest
from dflash_plugins.registration import PluginRegistration

from dflash_trt.backends.tensorrt.build import builder
from dflash_trt.backends.tensorrt.build.plugins import (
    register_plugins,
)
from dflash_trt.errors import DflashError
from dflash_trt.graph.functions import DFLASH_DOMAIN
from dflash_trt.hardware import kernels as accept
from dflash_trt.hardware.kernels import PLUGIN_INTERFACE
from tests.cli.bigram import write_bigram_pair
from tests.cli.conftest import Build, Run, edit_manifest, split_short_caches
from tests.standins.cuda import FakeCuda
from tests.standins.plugin_core import IDimensionExpr, Told, build_plugin, create_plugin
from tests.standins.plugin_tensorrt import FULL, PluginBuilder, PluginTensorRt
from tests.standins.stub_builder import FullBuilder, real

PLUGINS = [*FULL, "--plugins"]
DRAWN = ["row_groups", "row_sample"]
PER_CALL = {*DRAWN, "accept"}


def test_tensorrt_is_handed_plugins_in_place_of_bodies(
    run: Run, build: Build, engine_config: Path, full: PluginTensorRt
) -> None:
    output = build.folder
    build.well(engine_config, *PLUGINS)
    assert full.registered
    target, draft, target_only = full.handed
    calls = [node for node in target.graph.node if node.op_type == "kv_feature_injection"]
    assert calls and all(not node.overload for node in calls)
    for model, own in ((target, [*DRAWN, "accept"]), (target_only, DRAWN)):
        found = [node.op_type for node in model.graph.node if node.op_type in PER_CALL]
        assert found == own
        groups, sample = (node for node in model.graph.node if node.op_type in DRAWN)
        logits, positions, sampling = sample.input[:3]
        assert list(groups.input) == [logits, sampling]
        assert list(sample.input) == [logits, positions, sampling, *groups.output]
        assert not {one.name for one in model.functions} & PER_CALL
        assert "sampling" in {value.name for value in model.graph.input}
        assert "candidate_ids" not in {value.name for value in model.graph.output}
    assert not any(one.name == "kv_feature_injection" for one in target.functions)
    assert {one.name for one in draft.functions} == {"TRT_Attention", "swiglu"}
    # The bundle's own graph keeps the definition.
    stored = onnx.load(output / "target.onnx", load_external_data=False)
    assert any(one.name == "kv_feature_injection" for one in stored.functions)

    engines = build.manifest["engines"]
    operations = {one["graph"]: one["operations"] for one in engines["files"]}
    assert operations["target"] == {
        "TRT_Attention_explicit": "native",
        "accept": "plugin",
        "kv_feature_injection": "plugin",
        "row_groups": "plugin",
        "row_sample": "plugin",
        "swiglu": "function",
    }
    assert "plugin" not in operations["draft"].values()
    written = {one["graph"]: one["plugin_caches"] for one in engines["files"]}
    injected = [f"draft_{kv}_{layer}" for layer in range(len(calls)) for kv in "kv"]
    assert written == {"target": injected, "draft": [], "target_only": []}
    text = run("inspect", output).out
    assert "row_groups plugin, row_sample plugin, swiglu function" in text
    assert engines["draws"] and engines["plugin_interface"] == PLUGIN_INTERFACE
    assert "tokens are drawn and accepted in the target's engine" in text
    assert run("inspect", output, "--json").json["engines"]["files"][0]["operations"]


@pytest.mark.parametrize("is_long", [False, True])
def test_blocks_and_prompts_attend_by_plugins(
    run: Run,
    build: Build,
    tmp_path: Path,
    full: PluginTensorRt,
    monkeypatch: pytest.MonkeyPatch,
    is_long: bool,
) -> None:
    """In one launch where the cache is short, in two where it is long."""
    if is_long:
        split_short_caches(monkeypatch, 16)
    build.well(write_bigram_pair(tmp_path / "pair", head_dim=64), *PLUGINS)
    target, draft, _ = full.handed
    for one in (target, draft):
        assert not {"TRT_Attention", "block_attention"} & {own.name for own in one.functions}
    calls = ["block_attention_split", "block_attention_merge"] if is_long else ["block_attention"]
    found = [node.op_type for node in draft.graph.node if node.domain == DFLASH_DOMAIN]
    layers = sum(node.op_type == "swiglu" for node in draft.graph.node)
    assert [name for name in found if name != "swiglu"] == calls * layers
    shown = run("inspect", build.folder, "--json").json["engines"]["files"]
    files = {one["graph"]: one for one in shown}
    forms = dict.fromkeys(sorted(calls), "plugin") | {"swiglu": "function"}
    assert files["draft"]["operations"] == forms
    assert files["draft"]["fused_attentions"] == files["target"]["fused_attentions"] == 0
    assert forms.items() <= files["target"]["operations"].items()


def test_what_ends_a_callback_of_a_plugin_is_told(
    build: Build, engine_config: Path, full: PluginTensorRt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT keeps it to itself: it prints a trace, and its builder gives no reason."""

    def refuse(*arguments: Any) -> Any:
        raise DflashError("accept takes 300,000 bytes of shared memory", where="plugins")

    def swallow(self: PluginBuilder, network: Any, config: Any, writer: Any) -> bool:
        two, four = IDimensionExpr.of(2), IDimensionExpr.of(4)
        block = Told(real.DataType.INT64, (2, 4), (two, four))
        with suppress(DflashError):
            plugin = create_plugin(full, "accept", {})
            build_plugin(plugin, [block, block, Told(real.DataType.INT64, (2,), (two,))])
        return False

    monkeypatch.setattr(PluginBuilder, "build_serialized_network_to_stream", swallow)
    monkeypatch.setattr(PluginRegistration, "_implement", refuse)
    build(engine_config, *PLUGINS).fails(1, "plugins: accept takes 300,000 bytes of shared memory")
    assert not build.folder.exists()


@pytest.mark.usefixtures("full")
def test_ptx_is_tried_where_machine_code_is_refused(
    build: Build, engine_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, codes = {"ptx"}, []

    def note(*arguments: Any) -> set[str]:
        codes.append(arguments[-1])
        return register_plugins(*arguments)

    def refuse(self: PluginBuilder, network: Any, config: Any, writer: Any) -> bool:
        writer.write(b"half an engine")
        return codes[-1] in taken and FullBuilder.build_serialized_network_to_stream(
            self, network, config, writer
        )

    monkeypatch.setattr(builder, "register_plugins", note)
    with monkeypatch.context() as patch:
        patch.setattr(PluginBuilder, "build_serialized_network_to_stream", refuse)
        build.well(engine_config, *PLUGINS)
        assert codes == ["cubin", "ptx"] * 3
        files = build.manifest["engines"]["files"]
        summaries = [json.loads((build.folder / one["summary"]).read_text()) for one in files]
        assert {one["kernel_code"] for one in summaries} == {"ptx"}
        taken.clear()
        build(engine_config, *PLUGINS, "--overwrite").fails(1, "target.onnx: TensorRT cannot build")


@pytest.mark.usefixtures("full")
def test_what_plugins_need_is_asked_for_before_anything_is_written(
    build: Build, engine_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("dflash_trt.hardware.device.load_cuda", lambda: FakeCuda((8, 9)))
        pieces = ("--plugins: there are no kernels for sm_89", "sm_90, sm_100")
        build(engine_config, *PLUGINS).fails(2, *pieces)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "triton", None)
        pieces = ("Triton language is not installed", "'.[plugins]'")
        build(engine_config, *PLUGINS).fails(1, *pieces)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt.plugin", None)
        piece = "--plugins: TensorRT does not load its plugin module"
        build(engine_config, *PLUGINS).fails(1, piece)
    monkeypatch.setattr(accept, "MAX_ROWS", 4)
    build(engine_config, *PLUGINS).fails(
        2, "--block-size: a step settles at most 4 rows, not a block of", "--block-size"
    )
    build.well(engine_config, *PLUGINS, "--block-size", "4")


@pytest.mark.usefixtures("full")
def test_manifests_of_other_releases_and_such_that_contradict_themselves(
    run: Run, build: Build, engine_config: Path
) -> None:
    """Engines whose plugins have other operands are not loaded; what they are is told."""
    output = build.folder
    build.well(engine_config, *PLUGINS)
    for found, said in ((PLUGIN_INTERFACE + 1, "with interface"), (None, "with an older")):
        new = {"plugin_interface": found}
        edit_manifest(output, lambda manifest, new=new: manifest["engines"].update(new))
        pieces = [f"{output}: dflash-trt ", f"built its plugins {said}", "build the bundle again"]
        run("generate", output, "--prompt", "b").fails(1, *pieces)
    edit_manifest(output, lambda manifest: manifest.update(executor="tensorrt-rtx"))
    run("inspect", output).fails(1, "manifest.json", "engines that draw do not go with executor")
    edit_manifest(output, lambda manifest: manifest.update(executor="tensorrt"))
    edit_manifest(output, lambda manifest: manifest["engines"].pop("draws"))
    edit_manifest(output, lambda manifest: manifest["engines"]["files"][0].pop("plugin_caches"))
    shown = run("inspect", output, "--json").json["engines"]
    assert shown["draws"] is False and shown["files"][0]["plugin_caches"] == []

"""TensorRT with plugins, for what builds engines: NVIDIA's own plugin layer, parser and builder.

The contract it believes: a network asks for AOT plugins by a flag, a configuration for aliased
inputs by a preview feature; the parser finds a plugin's creator by namespace and type, has it make
the plugin of a node's attributes, and gives that as many inputs as it has tensors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")

from tests.standins.cuda import FakeCuda
from tests.standins.plugin_core import PluginCore, create_plugin
from tests.standins.stub_builder import FullBuilder, FullConfig, FullTensorRt, real

FULL = ["--executor", "tensorrt", "--precision", "bf16", "--max-seq-len", "100"]
AOT_FLAG, ALIASING = 7, "aliasing"


class PluginTensorRt(PluginCore, FullTensorRt):
    """TensorRT with plugins: its parser finds those that were registered."""

    def __init__(self) -> None:
        FullTensorRt.__init__(self)
        PluginCore.__init__(self)
        self.Builder = PluginBuilder
        self.handed: list[onnx.ModelProto] = []
        self.PreviewFeature = type("PreviewFeature", (), {"ALIASED_PLUGIN_IO_10_03": ALIASING})
        flags = {"STRONGLY_TYPED": 0, "PREFER_AOT_PYTHON_PLUGINS": AOT_FLAG}
        self.NetworkDefinitionCreationFlag = type("Flag", (), flags)

    def OnnxParser(self, network: Any, logger: Any) -> PluginParser:  # noqa: N802
        return PluginParser(self, network, logger)


class PluginBuilder(FullBuilder):
    def create_network(self, flags: int) -> Any:
        assert flags & 1 << AOT_FLAG
        strong = 1 << int(real.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        return self._builder.create_network(strong)

    def create_builder_config(self) -> PluginConfig:
        return PluginConfig(self._builder.create_builder_config())

    def build_serialized_network_to_stream(self, network: Any, config: Any, writer: Any) -> bool:
        assert config.features == [(ALIASING, True)]
        return super().build_serialized_network_to_stream(network, config, writer)


class PluginConfig(FullConfig):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.__dict__["features"] = []

    def set_preview_feature(self, feature: Any, on: bool) -> None:
        self.features.append((feature, on))


class PluginParser:
    """The real parser, over a model in which plugins pass their aliased inputs on."""

    def __init__(self, trt: PluginTensorRt, network: Any, logger: Any) -> None:
        self._trt = trt
        self._parser = real.OnnxParser(network, logger)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def parse(self, data: bytes, path: str) -> bool:
        model = onnx.load_from_string(data)
        self._trt.handed.append(onnx.load_from_string(data))
        functions = {(one.domain, one.name) for one in model.functions}
        nodes = []
        for node in model.graph.node:
            if node.domain == "" or (node.domain, node.op_type) in functions:
                nodes.append(node)
                continue
            nodes += self._pass_on(node, model.graph)
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        return bool(self._parser.parse(model.SerializeToString(), path))

    def _pass_on(self, node: onnx.NodeProto, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
        given = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        assert given.pop("plugin_version") == b"1"
        namespace = given.pop("plugin_namespace").decode()
        plugin = self._trt.registered[f"{namespace}::{node.op_type}"]
        assert len(node.input) == len(plugin.input_tensor_names)
        made = create_plugin(self._trt, node.op_type, given)
        assert made.get_num_outputs() == len(node.output)
        if node.op_type.startswith("block_attention"):  # q has the type and shape of attended
            is_last = not node.op_type.startswith("block_attention_split")
            return [helper.make_node("Identity", [node.input[0]], [*node.output])] * is_last
        if node.op_type == "row_groups":
            return []
        if node.op_type == "row_sample":
            tokens = node.output[:1]
            return [helper.make_node("ArgMax", [node.input[0]], tokens, axis=2, keepdims=0)]
        if node.op_type == "accept":
            accepted, new_tokens, bonus, new_start = node.output
            _, choices, start = node.input
            return [
                helper.make_node("Cast", [start], [accepted], to=onnx.TensorProto.INT32),
                helper.make_node("Identity", [choices], [new_tokens]),
                *(helper.make_node("Identity", [start], [name]) for name in (bonus, new_start)),
            ]
        if node.op_type == "gated_delta_step":
            return _pass_recurrence_on(node, graph)
        caches = [plugin.input_tensor_names.index(name) for name in ("k_cache", "v_cache")]
        return [
            helper.make_node("Identity", [node.input[cache]], [output])
            for cache, output in zip(caches, node.output, strict=True)
        ]


def _pass_recurrence_on(node: onnx.NodeProto, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Both caches as they are; y of its own width."""
    rows, state = node.input[4:6]
    (shape,) = (one.type.tensor_type.shape for one in graph.input if one.name == state)
    width = shape.dim[1].dim_value * shape.dim[2].dim_value
    y, state_out, rows_out = node.output
    bounds = [f"{y}/{name}" for name in ("begin", "end", "axis")]
    return [
        *(
            helper.make_node("Constant", [], [name], value_ints=[value])
            for name, value in zip(bounds, (0, width, 2), strict=True)
        ),
        helper.make_node("Slice", [node.input[0], *bounds], [y]),
        helper.make_node("Identity", [state], [state_out]),
        helper.make_node("Identity", [rows], [rows_out]),
    ]


def stand_in_builder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> PluginTensorRt:
    """Puts it and a GPU under everything that builds; compiled kernels are cached in `folder`."""
    trt = PluginTensorRt()
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", trt.plugin)
    monkeypatch.setattr("dflash_trt.hardware.device.load_cuda", lambda: FakeCuda())
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.with_name(f"{folder.name}-cache")))
    return trt

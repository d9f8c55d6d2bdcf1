"""NVIDIA's own `tensorrt.plugin`, over a stub of the compiled core that it stands on.

The layer is the Python of the package tensorrt_cu13_bindings, whose compiled core wants TensorRT's
libraries. TensorRT-RTX's core loads without them and has most of the layer's types; here are the
others: expressions of extents, the base of ahead-of-time plugins, the registry. `build_plugin`
asks a plugin what TensorRT's builder asks, in its order, and takes only what its casts take.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX (the rtx extra) is not installed")
if (_bindings := find_spec("tensorrt_bindings")) is None:
    pytest.skip(
        "NVIDIA's Python plugin layer (tensorrt_cu13_bindings) is not installed",
        allow_module_level=True,
    )

import tensorrt_rtx as real

Shapes = Sequence[tuple[int, ...]]
"""The shape of every input in one call of an engine."""


class IDimensionExpr:
    """An extent in a call's shapes; a constant is known when the engine is built."""

    def __init__(self, read: Callable[[Shapes], int], constant: int | None = None) -> None:
        self.read, self._constant = read, constant

    @classmethod
    def of(cls, value: int) -> IDimensionExpr:
        return cls(lambda shapes: value, value)

    def is_constant(self) -> bool:
        return self._constant is not None

    def get_constant_value(self) -> int:
        assert self._constant is not None, "asked for the value of an extent that changes"
        return self._constant


class ExprBuilder:
    """Makes expressions, of expressions alone."""

    _COMPUTE: Mapping[Any, Callable[[int, int], int]] = {
        real.DimensionOperation.SUM: lambda a, b: a + b,
        real.DimensionOperation.SUB: lambda a, b: a - b,
        real.DimensionOperation.PROD: lambda a, b: a * b,
        real.DimensionOperation.FLOOR_DIV: lambda a, b: a // b,
    }

    def constant(self, value: int) -> IDimensionExpr:
        assert type(value) is int
        return IDimensionExpr.of(value)

    def operation(self, operation: Any, first: Any, second: Any) -> IDimensionExpr:
        assert isinstance(first, IDimensionExpr) and isinstance(second, IDimensionExpr)
        compute = self._COMPUTE[operation]
        if first.is_constant() and second.is_constant():
            value = compute(first.get_constant_value(), second.get_constant_value())
            return IDimensionExpr.of(value)
        return IDimensionExpr(lambda shapes: compute(first.read(shapes), second.read(shapes)))


class DimsExprs(list[IDimensionExpr | None]):
    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


class QuickPluginCreationRequest(Enum):
    UNKNOWN, PREFER_JIT, PREFER_AOT, STRICT_JIT, STRICT_AOT = range(5)


class ISymExpr:
    """An integer that a launch takes, as the layer describes it."""

    dtype: Any
    expr: Any


class IPluginV3QuickAOTBuild:
    """What ahead-of-time plugins build on beside TensorRT-RTX's classes."""


class SymExprs(dict[int, ISymExpr]):
    nbSymExprs = 0  # noqa: N815 - the core's name


class Registry:
    """Creators by type, version and namespace."""

    def __init__(self) -> None:
        self._creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, plugin_namespace: str = "") -> bool:
        assert isinstance(creator, real.IPluginCreatorV3Quick)
        key = (creator.name, creator.plugin_version, plugin_namespace)
        return self._creators.setdefault(key, creator) is creator

    def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> Any:
        return self._creators.get((type, version, plugin_namespace))


class PluginCore:
    """What the layer imports as `tensorrt`; its `plugin` is the layer."""

    IDimensionExpr, DimsExprs, ISymExpr = IDimensionExpr, DimsExprs, ISymExpr
    IPluginV3QuickAOTBuild = IPluginV3QuickAOTBuild
    QuickPluginCreationRequest = QuickPluginCreationRequest

    def __init__(self) -> None:
        assert _bindings is not None
        self.__path__ = _bindings.submodule_search_locations
        self._registry = Registry()
        self.plugin = _load_layer(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)

    def get_plugin_registry(self) -> Registry:
        return self._registry

    @property
    def registered(self) -> Mapping[str, Any]:
        """The layer's definitions of plugins, by namespace::name."""
        return self.plugin._lib.QDP_REGISTRY  # type: ignore[no-any-return]


def _load_layer(core: PluginCore) -> Any:
    """The layer anew, over `core`, without a trace among the modules that are loaded."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt"]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "tensorrt", core)
        layer = importlib.import_module("tensorrt.plugin")
        for name in [name for name in sys.modules if name.startswith("tensorrt.")]:
            del sys.modules[name]
    return layer


@dataclass(frozen=True)
class Told:
    """A tensor as TensorRT tells of it: `dims` has -1 for what it does not tell."""

    dtype: Any
    dims: tuple[int, ...]
    extents: tuple[IDimensionExpr, ...]


@dataclass(frozen=True)
class BuiltLaunch:
    """What TensorRT embeds of one tactic."""

    name: str
    code: bytes
    grid: tuple[IDimensionExpr, ...]
    block: tuple[IDimensionExpr, ...]
    shared: IDimensionExpr
    extras: tuple[IDimensionExpr, ...]


@dataclass(frozen=True)
class BuiltPlugin:
    """The answers of a plugin. An alias is an input's index, or -1; tactics are TensorRT's."""

    types: list[Any]
    shapes: list[tuple[IDimensionExpr, ...]]
    aliases: list[int]
    timing_id: str
    launches: dict[int, BuiltLaunch]


def create_plugin(core: PluginCore, name: str, attributes: Mapping[str, Any]) -> Any:
    """The plugin of a node, whose attributes are int32 or float32, as the ONNX parser makes it."""
    creator = core.get_plugin_registry().get_creator(name, "1", "dflash")
    fields = []
    for known in creator.field_names:
        value = attributes[known.name]
        kind = "FLOAT32" if isinstance(value, float) else "INT32"
        data = np.array([value], kind.lower())
        fields.append(real.PluginField(known.name, data, getattr(real.PluginFieldType, kind)))
    assert len(fields) == len(attributes)
    plugin = creator.create_plugin(
        name,
        "dflash",
        real.PluginFieldCollection(fields),
        real.TensorRTPhase.BUILD,
        QuickPluginCreationRequest.PREFER_AOT,
    )
    assert isinstance(plugin, real.IPluginV3) and isinstance(plugin, IPluginV3QuickAOTBuild)
    return plugin.clone()  # the network keeps a copy


def build_plugin(plugin: Any, inputs: Sequence[Told]) -> BuiltPlugin:
    """What `plugin` answers while an engine is built, of inputs that TensorRT tells so."""
    given = [one.dtype for one in inputs]
    types = plugin.get_output_data_types(given, [len(one.dims) for one in inputs])
    assert len(types) == plugin.get_num_outputs()
    assert all(isinstance(one, real.DataType) for one in types)
    timing_id = plugin.get_timing_cache_id()
    assert isinstance(timing_id, str)
    builder = ExprBuilder()
    extents = [_dims_exprs(one.extents) for one in inputs]
    shapes = [tuple(one) for one in plugin.get_output_shapes(extents, [], builder)]
    assert all(isinstance(extent, IDimensionExpr) for shape in shapes for extent in shape)
    aliases = [plugin.get_aliased_input(index) for index in range(len(types))]
    told = [(one.dtype, one.dims) for one in inputs]
    told += [
        (kind, tuple(one.get_constant_value() if one.is_constant() else -1 for one in shape))
        for kind, shape in zip(types, shapes, strict=True)
    ]
    tensors = [_tensor(*one) for one in told]
    formats = plugin.get_supported_format_combinations(tensors, len(inputs))
    assert [(one.type, one.format) for one in formats] == [
        (kind, real.TensorFormat.LINEAR) for kind, _ in told
    ]
    plugin.configure_plugin(tensors[: len(inputs)], tensors[len(inputs) :])
    launches = {}
    for tactic in plugin.get_valid_tactics() or [0]:
        assert type(tactic) is int
        plugin.set_tactic(tactic)
        launches[tactic] = _launch(plugin, extents, tensors, len(inputs), builder)
    return BuiltPlugin(types, shapes, aliases, timing_id, launches)


def _launch(
    plugin: Any, extents: Any, tensors: list[Any], inputs: int, builder: ExprBuilder
) -> BuiltLaunch:
    params, extras = SimpleNamespace(), SymExprs()
    plugin.get_launch_params(extents, tensors, inputs, params, extras, builder)
    descriptions = [one.desc for one in tensors]
    name, code = plugin.get_kernel(descriptions[:inputs], descriptions[inputs:])
    assert isinstance(name, str) and isinstance(code, bytes)
    sizes = [
        _expression(getattr(params, f"{of}_{axis}")) for of in ("grid", "block") for axis in "xyz"
    ]
    arguments = tuple(_expression(extras[index]) for index in range(extras.nbSymExprs))
    assert len(extras) == extras.nbSymExprs
    grid, block = tuple(sizes[:3]), tuple(sizes[3:])
    return BuiltLaunch(name, code, grid, block, _expression(params.shared_mem), arguments)


def _expression(argument: Any) -> IDimensionExpr:
    assert isinstance(argument, ISymExpr)
    assert argument.dtype == real.PluginArgDataType.INT32
    assert isinstance(argument.expr, IDimensionExpr)
    return argument.expr


def _dims_exprs(extents: tuple[IDimensionExpr, ...]) -> DimsExprs:
    result = DimsExprs(len(extents))
    result[:] = extents
    return result


def _tensor(dtype: Any, dims: tuple[int, ...]) -> Any:
    tensor, description = real.DynamicPluginTensorDesc(), real.PluginTensorDesc()
    description.type, description.dims = dtype, dims
    description.format = real.TensorFormat.LINEAR
    tensor.desc = description
    return tensor

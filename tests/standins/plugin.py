"""What `tensorrt.plugin` documents of registration (11.4), without TensorRT.

Symbolic extents are functions of the call's shapes; as in the real module they compute with the
expression on the left only, and refuse to be integers. A plugin is asked for its outputs twice
before it is told a shape: for their types, of extents that mean nothing, and for their shapes, of
extents that are all expressions, those that the network fixes as well.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

ATTRIBUTES = (int, float, bool, str, bytes)


class DataType(Enum):
    FLOAT, HALF, BF16, FP8, INT32, INT64 = range(6)


class SymIntExpr:
    def __init__(self, value: Any) -> None:
        if isinstance(value, SymIntExpr):
            self.read: Callable[[Any], int] = lambda shapes: value.read(shapes)
        else:
            assert type(value) is int, f"{value!r} is no extent"
            self.read = lambda shapes: value

    def _with(self, other: Any, compute: Callable[[int, int], int]) -> Any:
        right = SymIntExpr(other)
        result = type(self)(0)
        result.read = lambda shapes: compute(self.read(shapes), right.read(shapes))
        return result

    def __add__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a - b)

    def __mul__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a * b)

    def __floordiv__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a // b)


class SymInt32(SymIntExpr):
    pass


class ShapeExpr(SymInt32):
    pass


class SymIntExprs:
    def __init__(self, length: int) -> None:
        self.expressions: list[Any] = [None] * length

    def __setitem__(self, index: int, expression: Any) -> None:
        assert isinstance(expression, SymInt32)
        self.expressions[index] = expression

    def __iter__(self) -> Iterator[Any]:
        return iter(self.expressions)


class KernelLaunchParams:
    NAMES = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_mem")

    def __init__(self) -> None:
        for name in self.NAMES:
            setattr(self, name, 0 if name == "shared_mem" else 1)

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in self.NAMES, name
        object.__setattr__(self, name, SymInt32(value))


class TensorDesc:
    """`shape` has -1 where an extent changes; `index` tells where the expressions read from."""

    def __init__(
        self, dtype: DataType, shape: tuple[int, ...], index: int, *, has_shape: bool = True
    ) -> None:
        self.dtype, self.index, self.has_shape = dtype, index, has_shape
        self._shape = shape
        self.alias: TensorDesc | None = None
        self.shape_expr = tuple(self._extent(axis) for axis in range(len(shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        assert self.has_shape, "no shape is known yet"
        return self._shape

    def _extent(self, axis: int) -> ShapeExpr:
        expression = ShapeExpr(0)
        expression.read = lambda shapes: shapes[self.index][axis]
        return expression

    def when_types_are_asked(self) -> TensorDesc:
        fake = self.when_shapes_are_asked()
        fake.shape_expr = tuple(ShapeExpr(0) for _ in self._shape)
        for expression in fake.shape_expr:
            del expression.read
        return fake

    def when_shapes_are_asked(self) -> TensorDesc:
        return TensorDesc(self.dtype, self._shape, self.index, has_shape=False)

    def aliased(self) -> TensorDesc:
        copy = TensorDesc(self.dtype, self._shape, self.index, has_shape=self.has_shape)
        copy.alias = self
        return copy


def from_shape_expr(shape_expr: tuple[Any, ...], dtype: DataType) -> Any:
    return SimpleNamespace(
        dtype=dtype, alias=None, shape_expr=tuple(ShapeExpr(extent) for extent in shape_expr)
    )


class AutoTuneCombination:
    def __init__(self, io_types: str, layouts: str, tactics: list[int] | None) -> None:
        self.io_types, self.layouts, self.tactics = io_types.split(", "), layouts, tactics
        assert tactics is None or min(tactics) > 0


class FakePlugin:
    """The module: what was registered is in `plugins`, checked as the real decorators check it."""

    TensorDesc, ShapeExpr, SymInt32, SymIntExprs = TensorDesc, ShapeExpr, SymInt32, SymIntExprs
    KernelLaunchParams, AutoTuneCombination = KernelLaunchParams, AutoTuneCombination
    from_shape_expr = staticmethod(from_shape_expr)

    def __init__(self) -> None:
        self.op = SimpleNamespace()
        self.plugins: dict[str, SimpleNamespace] = {}

    def register(self, plugin_id: str) -> Callable[[Any], Any]:
        def decorate(function: Any) -> Any:
            namespace, name = plugin_id.split("::")
            known = getattr(self.op, namespace, SimpleNamespace())
            assert not hasattr(known, name), f"{plugin_id} is registered"
            assert namespace not in ("trt", "tensorrt", "std")
            signature = inspect.signature(function)
            kinds = {name: one.annotation for name, one in signature.parameters.items()}
            tensors = [name for name, kind in kinds.items() if kind is TensorDesc]
            assert list(kinds)[: len(tensors)] == tensors, "tensors come first"
            attributes = {name: kind for name, kind in kinds.items() if kind is not TensorDesc}
            assert all(kind in ATTRIBUTES for kind in attributes.values())
            assert typing.get_origin(signature.return_annotation) is tuple
            outputs = typing.get_args(signature.return_annotation)
            assert all(kind is TensorDesc for kind in outputs)
            self.plugins[plugin_id] = SimpleNamespace(
                describe=function, tensors=tensors, attributes=attributes, outputs=len(outputs)
            )
            setattr(known, name, self.plugins[plugin_id])
            setattr(self.op, namespace, known)
            return function

        return decorate

    def autotune(self, plugin_id: str) -> Callable[[Any], Any]:
        return self._decorator(plugin_id, "tune", ["outputs"], list)

    def aot_impl(self, plugin_id: str) -> Callable[[Any], Any]:
        return self._decorator(plugin_id, "implement", ["outputs", "tactic"], tuple)

    def _decorator(
        self, plugin_id: str, role: str, extra: list[str], result: type
    ) -> Callable[[Any], Any]:
        def decorate(function: Any) -> Any:
            plugin = self.plugins[plugin_id]
            signature = inspect.signature(function)
            assert list(signature.parameters) == [*plugin.tensors, *plugin.attributes, *extra]
            for name, kind in plugin.attributes.items():
                assert signature.parameters[name].annotation is kind
            assert typing.get_origin(signature.return_annotation) is result
            if result is tuple:
                assert typing.get_args(signature.return_annotation) == (
                    str,
                    str,
                    KernelLaunchParams,
                    SymIntExprs,
                )
            setattr(plugin, role, function)
            return function

        return decorate

"""Triton language's interpreter with less work of its own around every operation: the same bits.

Most of its time goes to what does not depend on numbers: it looks for all functions of its language
again whenever one kernel function calls another, and builds a shape and a type again for every
result. In a process that only interprets, the first is done once, and the others are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


def take_shortcuts() -> None:
    """Replaces functions of the interpreter in this process, which must do nothing but interpret.

    Raises:
        AttributeError: this release of Triton language has no such function.
    """
    from triton.language import core
    from triton.runtime import interpreter

    _replace(interpreter, "_patch_lang", _patch_once)
    _replace(interpreter, "_get_np_dtype", _keep_types)
    _keep_shapes(core)


def _replace(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    setattr(owner, name, change(getattr(owner, name)))


def _patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_patch_lang`, once for each module of kernels; its changes stay."""

    class Nothing:
        def restore(self) -> None:
            """As its scope has it, which puts back what was patched."""

    patched: dict[int, dict[str, Any]] = {}

    def patch_module(function: Any) -> Nothing:
        names = function.__globals__
        if id(names) not in patched:
            patch(function)
            patched[id(names)] = names
        return Nothing()

    return patch_module


def _keep_types(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_get_np_dtype` by the name of an element's type, which says which one it is."""
    found: dict[str, Any] = {}

    def find_once(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    return find_once


def _keep_shapes(core: Any) -> None:
    """Tensors and their types share shapes, which nothing changes."""
    constexpr, block_type = core.constexpr, core.block_type

    @cache
    def shape_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
        numel = 1
        for size in shape:
            numel *= size
        return constexpr(numel), core.tuple([constexpr(size) for size in shape])

    make_type = block_type.__init__
    types: dict[tuple[int, ...], tuple[Any, Any, str]] = {}

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, constexpr) else size for size in shape])
        if sizes not in types:
            make_type(self, element_ty, shape)
            types[sizes] = (self.shape, self.numel, f"<{self.shape}, ")
            return
        self.shape, self.numel, name = types[sizes]
        self.element_ty = element_ty
        self.name = f"{name}{element_ty}>"

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(tuple(type.shape) if type.is_block() else ())

    block_type.__init__ = make_block_type
    core.tensor.__init__ = make_tensor

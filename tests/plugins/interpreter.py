"""Runs a kernel in Triton language's interpreter, in a process of its own.

TRITON_INTERPRET is read when Triton language is imported and holds until the process ends. So a
process that interprets cannot compile kernels or train.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from dflash_plugins.operation import Attributes, Launch, Operation, TensorSpec
from dflash_plugins.table import load_kernel
from dflash_plugins.testing.guarded import Arrays, Buffers, run_guarded
from dflash_plugins.testing.numeric import Array, GuardedBuffer, find_mismatch, find_other_bits

Result = TypeVar("Result")


def assert_close(actual: Array, expected: Array, bound: float | Array) -> None:
    """Raises AssertionError that names the first coordinate beyond `bound`."""
    mismatch = find_mismatch(actual, expected, bound)
    assert mismatch is None, mismatch


def assert_same_bits(actual: Array, expected: Array) -> None:
    """Raises AssertionError that names the first coordinate whose bits differ."""
    mismatch = find_other_bits(actual, expected)
    assert mismatch is None, mismatch


class Interpreter(ProcessPoolExecutor):
    """A process that interprets kernels."""

    def __init__(self) -> None:
        super().__init__(1, multiprocessing.get_context("spawn"), _begin)

    def run(
        self, operation: str, inputs: Arrays, attributes: Attributes | None = None, tactic: int = 0
    ) -> dict[str, Array]:
        """Outputs of `operation` over `inputs` (aliased ones are copies).

        Raises:
            AssertionError: the kernel wrote outside of its outputs.
        """
        return self.call(_run, operation, dict(inputs), attributes or {}, tactic)

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls `function` in that process, which must be able to import its module."""
        return self.submit(function, *arguments).result()


def _begin() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime.interpreter import interpreter_builder

    # It multiplies float32 as float32, whatever a GPU makes of it, but checks the name.
    options = interpreter_builder.options
    names = (*options.allowed_dot_input_precisions, "bf16x6")
    interpreter_builder.options = replace(options, allowed_dot_input_precisions=names)
    _patch_once()
    _round_fp8()
    _refuse_narrow_products()
    _watch_memory()


def _patch_once() -> None:
    """Has the interpreter patch its language once for each module of kernels, not at every call."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, dict[int, dict[str, Any]]()

    def patch_module(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in patched:
            patch(function)
            patched[id(names)] = names
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_module


_MOST_ACCESSES = 3_000
"""Loads and stores of a program, which reads a cache of 16,384 positions in a thousand."""

_tensors: list[tuple[int, int]] = []
"""Where the tensors of the launch that runs begin and end."""


def tell_tensors(tensors: Iterable[Array]) -> None:
    """Which memory the next launch may read and write; without any it is not looked at."""
    _tensors[:] = [(one.ctypes.data, one.ctypes.data + one.nbytes) for one in tensors]


def _watch_memory() -> None:
    """Raises AssertionError where a program reads or writes outside of all tensors, or never ends.

    Every loop of a kernel loads something, but those that halve an interval.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    accesses = 0
    place, load = InterpreterBuilder.set_grid_idx, InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store

    def begin_program(self: Any, *index: int) -> Any:
        nonlocal accesses
        accesses = 0
        return place(self, *index)

    def check(pointers: Any, mask: Any, doing: str) -> None:
        nonlocal accesses
        accesses += 1
        assert accesses <= _MOST_ACCESSES, "a program does not end"
        if not _tensors:
            return
        size = pointers.get_element_ty().primitive_bitwidth // 8
        held = pointers.data[mask.data.astype(bool)].astype(np.uint64)
        inside = np.zeros(held.shape, bool)
        for first, end in _tensors:
            inside |= (held >= first) & (held <= end - size)
        assert inside.all(), f"a program {doing} outside of every tensor"

    def load_inside(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        check(pointers, mask, "reads")
        return load(self, pointers, mask, *others)

    def store_inside(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        check(pointers, mask, "writes")
        return store(self, pointers, value, mask, *others)

    InterpreterBuilder.set_grid_idx = begin_program
    InterpreterBuilder.create_masked_load = load_inside
    InterpreterBuilder.create_masked_store = store_inside


def _refuse_narrow_products() -> None:
    """Raises AssertionError for products of bfloat16: the interpreter multiplies bit patterns."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        assert tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar), "interpreted bfloat16 tl.dot"
        return multiply(self, a, b, *others)

    InterpreterBuilder.create_dot = create_dot


def _round_fp8() -> None:
    """Has float32 become E4M3 as on a GPU: rounded to the nearest, at most the largest.

    The interpreter of 3.6 cuts subnormal numbers and halves some that round up to a power of two.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    largest = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)  # type: ignore[no-untyped-call]

    def round_fp8(values: Array, source: Any, target: Any, rounding: Any) -> Array:
        if (source, target) != (tl.float32, tl.float8e4nv):
            converted: Array = convert(values, source, target, rounding)
            return converted
        return np.clip(values, -largest, largest).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    interpreter._convert_float = round_fp8


def _run(
    name: str, inputs: dict[str, Array], attributes: Attributes, tactic: int
) -> dict[str, Array]:
    return run_guarded(name, inputs, attributes, tactic, _interpret)


def _interpret(
    operation: Operation, launch: Launch, specs: Mapping[str, TensorSpec], buffers: Buffers
) -> None:
    arguments: dict[str, Any] = {key: _tensor(buffers[key], spec) for key, spec in specs.items()}
    arguments |= dict(zip(operation.extras, launch.extras, strict=True)) | dict(launch.constants)
    tell_tensors(buffers[key].inner for key in specs)
    load_kernel(operation.kernel)[launch.grid](**arguments)


def _tensor(buffer: GuardedBuffer, spec: TensorSpec) -> Any:
    """The buffer's inner bytes as a tensor that the interpreter takes."""
    import torch

    kind = getattr(torch, spec.dtype.numpy.name)
    return torch.from_numpy(buffer.inner).view(kind).reshape(spec.shape)

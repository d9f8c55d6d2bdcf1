"""Runs a kernel in Triton language's interpreter, in a process of its own.

TRITON_INTERPRET is read when Triton language is imported and holds until the process ends. So a
process that interprets cannot compile kernels or train.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
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
    load_kernel(operation.kernel)[launch.grid](**arguments)


def _tensor(buffer: GuardedBuffer, spec: TensorSpec) -> Any:
    """The buffer's inner bytes as a tensor that the interpreter takes."""
    import torch

    kind = getattr(torch, spec.dtype.numpy.name)
    return torch.from_numpy(buffer.inner).view(kind).reshape(spec.shape)

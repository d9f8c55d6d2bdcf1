"""The description of an operation in plain Python: its tensors, and how its kernel is launched.

An extent (one dimension of a shape) is an integer or, while an engine is built, a symbolic
expression of TensorRT's, even where the engine fixes it. Those expressions have only + - * // with
the extent on the left, so launch code uses nothing else. A compile-time constant of a kernel must
be an integer: `fixed` makes one of an extent that the engine fixes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dflash_trt.errors import DflashError
from dflash_trt.hardware.kernels import Extent

Constant = int | float | bool | None
KernelCode = Literal["cubin", "ptx"]
"""What TensorRT is handed of a kernel: machine code of one architecture, or what makes it."""
Attributes = Mapping[str, Any]

DOMAIN, VERSION = "dflash", "1"
"""Of all plugins. TensorRT's Python layer gives every plugin this version: what tells engines with
other operands apart is dflash_trt/hardware/kernels.py.
"""


class DType(Enum):
    """An element type: its name in Triton language, TensorRT's, and NumPy's."""

    FLOAT32 = ("fp32", "FLOAT", np.float32)
    FLOAT16 = ("fp16", "HALF", np.float16)
    BFLOAT16 = ("bf16", "BF16", ml_dtypes.bfloat16)
    FLOAT8 = ("fp8e4nv", "FP8", ml_dtypes.float8_e4m3fn)
    INT32 = ("i32", "INT32", np.int32)
    INT64 = ("i64", "INT64", np.int64)

    def __init__(self, kernel_name: str, tensorrt_name: str, element: Any) -> None:
        self.kernel_name = kernel_name
        self.tensorrt_name = tensorrt_name
        self.numpy: np.dtype[Any] = np.dtype(element)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's element type and shape."""

    dtype: DType
    shape: tuple[Extent, ...]

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> TensorSpec:
        """The element type and shape of `array`."""
        return cls(next(one for one in DType if one.numpy == array.dtype), array.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.numpy.itemsize


Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is launched over tensors of given shapes.

    Args:
        grid: thread blocks along x, y, z.
        extras: the int32 arguments between inputs and outputs, in the operation's order.
        constants: the kernel's `tl.constexpr` parameters, by name; None for an absent tensor.
        warps: warps of a thread block.
        stages: depth of the software pipeline of the kernel's loops.
    """

    grid: tuple[Extent, Extent, Extent]
    extras: tuple[Extent, ...]
    constants: Mapping[str, Constant]
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True, slots=True)
class Operation:
    """One plugin, `dflash::NAME`. Graph function, plugin and kernel take tensors in this order.

    Args:
        kernel: name of the kernel's function, which `table.load_kernel` imports.
        inputs, outputs: names of tensors.
        extras: names of the int32 arguments.
        aliases: output → the input that it updates in place.
        attributes: name → type (int or float); compiled into the kernel.
        describe: types and shapes of the outputs that are not aliases, from inputs and attributes.
            TensorRT calls it before it knows any extent, so it must not call `fixed`.
        launch: the launch for inputs, attributes and a tactic.
        tactics: how many launch variants there are; all compute the same.
    """

    name: str
    kernel: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    launch: Callable[[Specs, Attributes, int], Launch]
    extras: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, type] = field(default_factory=dict)
    describe: Callable[[Specs, Attributes], Mapping[str, TensorSpec]] = lambda specs, attributes: {}
    tactics: int = 1

    @property
    def plugin_id(self) -> str:
        """The name that TensorRT knows it by."""
        return f"{DOMAIN}::{self.name}"

    def output_specs(self, inputs: Specs, attributes: Attributes) -> dict[str, TensorSpec]:
        """Type and shape of every output, in the order of `outputs`."""
        own = self.describe(inputs, attributes)
        return {
            name: inputs[self.aliases[name]] if name in self.aliases else own[name]
            for name in self.outputs
        }


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Everything that a kernel's machine code depends on, besides its source and the architecture.

    `parameters` are the run-time arguments in order: name and type ("*bf16", "i32").
    """

    kernel: str
    parameters: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Case:
    """An operation at given shapes, to compile, test or measure; reports show its name."""

    name: str
    operation: Operation
    inputs: Specs
    attributes: Attributes = field(default_factory=dict)

    def launch(self, tactic: int = 0) -> Launch:
        return self.operation.launch(self.inputs, self.attributes, tactic)

    def kernel_spec(self, tactic: int = 0) -> KernelSpec:
        return kernel_spec(self.operation, {**self.inputs, **self.outputs}, self.launch(tactic))

    @property
    def outputs(self) -> dict[str, TensorSpec]:
        """Type and shape of every output, in order."""
        return self.operation.output_specs(self.inputs, self.attributes)


def kernel_spec(operation: Operation, tensors: Specs, launch: Launch) -> KernelSpec:
    """The kernel that `launch` needs; `tensors` describe all inputs and outputs."""
    pointers = {name: f"*{spec.dtype.kernel_name}" for name, spec in tensors.items()}
    parameters = [(name, pointers[name]) for name in operation.inputs]
    parameters += [(name, "i32") for name in operation.extras]
    parameters += [(name, pointers[name]) for name in operation.outputs]
    return KernelSpec(
        operation.kernel,
        tuple(parameters),
        tuple(launch.constants.items()),
        launch.warps,
        launch.stages,
    )


def fixed(extent: Extent, what: str) -> int:
    """`extent` as an integer, for a compile-time constant; `what` names it in the error.

    Raises:
        DflashError: it differs between calls of an engine.
    """
    if isinstance(extent, int):
        return extent
    if extent.is_constant:
        return int(extent.constant_value())
    raise DflashError(f"{what} must be fixed when the engine is built")


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`; `tl.arange` takes no other length."""
    return 1 << max(0, count - 1).bit_length()

"""What tests run in the interpreting process besides whole operations.

Caches of more than 2^31 elements take the memory that is touched: the interpreter's launch copies
every tensor onto itself, and what stands for a tensor here lets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from dflash_plugins.operation import Attributes, DType, TensorSpec
from dflash_plugins.table import load_kernel, operations
from dflash_plugins.testing.numeric import Array

Place = tuple[Any, ...]
"""An index into a cache."""


class SparseTensor:
    """Zeros of `shape`, whose pages of memory come into being as they are written."""

    def __init__(self, spec: TensorSpec) -> None:
        self.array: Array = np.zeros(spec.shape, spec.dtype.numpy)
        self.dtype = getattr(torch, spec.dtype.numpy.name)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> SparseTensor:
        return self

    def cpu(self) -> SparseTensor:
        return self

    def new_empty(self, size: int, device: str) -> SparseTensor:
        return self

    def set_(self, *arguments: Any) -> None:
        """Is what it shall be already."""

    def copy_(self, other: SparseTensor) -> None:
        assert other is self

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)


def run_sparse(
    name: str,
    inputs: Mapping[str, Array],
    attributes: Attributes,
    cache: tuple[int, ...],
    written: Mapping[str, tuple[Place, Array]],
    places: list[Place],
) -> dict[str, Array]:
    """Operation `name` over `inputs` and FP8 caches k_cache, v_cache of shape `cache`.

    The caches are zeros but for what is `written` at a place of each. Returns the outputs; of
    caches, what they hold at `places`.
    """
    operation = operations()[name]
    specs = {key: TensorSpec.of(array) for key, array in inputs.items()}
    specs |= dict.fromkeys(("k_cache", "v_cache"), TensorSpec(DType.FLOAT8, cache))
    tensors = {key: SparseTensor(spec) for key, spec in specs.items()}
    for key, values in inputs.items():
        tensors[key].array[...] = values
    for key, (place, values) in written.items():
        tensors[key].array[place] = values
    for key, spec in operation.output_specs(specs, attributes).items():
        alias = operation.aliases.get(key)
        tensors[key] = SparseTensor(spec) if alias is None else tensors[alias]
    launch = operation.launch(specs, attributes, 0)
    arguments: dict[str, Any] = {**tensors, **dict(launch.constants)}
    arguments |= dict(zip(operation.extras, launch.extras, strict=True))
    load_kernel(operation.kernel)[launch.grid](**arguments)
    return {
        key: np.stack([tensors[key].array[place] for place in places])
        if key in operation.aliases
        else tensors[key].array
        for key in operation.outputs
    }

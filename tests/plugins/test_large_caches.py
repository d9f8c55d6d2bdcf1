"""Caches of more than 2^31 elements, interpreted: where an int32 offset would be negative.

A pool of Qwen3-8B's heads has so many from 65,536 pages of 32 on: 2 GiB of FP8 codes. A linear
cache has more heads instead of positions, whose table of angles would be 1 GiB itself. Only what is
touched takes memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from dflash_plugins.operation import Attributes, DType, TensorSpec
from dflash_plugins.table import load_kernel, operations
from dflash_plugins.testing.numeric import Array

from tests.plugins.interpreter import Interpreter, assert_same_bits, tell_tensors

HEADS, HEAD_DIM, PAGE_SIZE = 8, 128, 32
PAGES = 2**31 // (PAGE_SIZE * HEADS * HEAD_DIM) + 4
LENGTH = 2**31 // (HEADS * HEAD_DIM) + 128
FP8 = DType.FLOAT8.numpy
ROWS = 4


Place = tuple[Any, ...]
"""An index into a cache."""


class SparseTensor:
    """Zeros of `shape`, whose pages of memory come into being as they are written."""

    def __init__(self, spec: TensorSpec) -> None:
        import torch

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
    tell_tensors(one.array for one in tensors.values())
    load_kernel(operation.kernel)[launch.grid](**arguments)
    return {
        key: np.stack([tensors[key].array[place] for place in places])
        if key in operation.aliases
        else tensors[key].array
        for key in operation.outputs
    }


def codes(generator: np.random.Generator, *shape: int) -> Array:
    """Values that every rounding leaves alone."""
    return generator.choice([-4.0, -0.5, 2.0, 8.0], shape).astype(np.float32)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("name", ["kv_cache_update", "kv_feature_injection"])
def test_rows_are_written_past_2_31_elements(
    interpreter: Interpreter, name: str, is_paged: bool
) -> None:
    """The last page's last rows and then the first page's; the last rows of the last head."""
    generator = np.random.default_rng(0)
    injects = name == "kv_feature_injection"
    heads, length = (HEADS, LENGTH) if is_paged else (32 * HEADS, LENGTH // 32)
    shape = (1, ROWS, heads, HEAD_DIM) if injects else (1, heads, ROWS, HEAD_DIM)
    inputs: dict[str, Array] = {one: codes(generator, *shape) for one in "kv"}
    first = PAGE_SIZE - 2 if is_paged else length - ROWS
    positions = np.arange(first, first + ROWS)
    inputs["positions"] = positions[None]
    inputs["kv_scales"] = np.ones(2, np.float32)
    attributes: dict[str, Any] = {}
    if injects:
        inputs["k_norm"] = np.ones(HEAD_DIM, np.float32)
        table = np.zeros((first + ROWS, HEAD_DIM // 2), np.float32)
        inputs |= {"cos": table, "sin": table + np.float32(1)}
        attributes["epsilon"] = 1e-6
    cache: tuple[int, ...] = (1, heads, length, HEAD_DIM)
    places: list[Any] = [(0, slice(None), position) for position in positions]
    if is_paged:
        inputs["page_table"] = np.array([[PAGES - 1, 0]], np.int32)
        attributes["page_size"] = PAGE_SIZE
        cache = (PAGES, PAGE_SIZE, HEADS, HEAD_DIM)
        places = [(PAGES - 1, 30), (PAGES - 1, 31), (0, 0), (0, 1)]
    operation = f"{name}{'_paged' * is_paged}_fp8"
    outputs = interpreter.call(run_sparse, operation, inputs, attributes, cache, {}, places)
    by_row = {one: inputs[one][0] if injects else inputs[one][0].swapaxes(0, 1) for one in "kv"}
    assert_same_bits(outputs["v_cache_out"], by_row["v"].astype(FP8))
    if injects:
        assert outputs["k_cache_out"].astype(np.float32).all()
    else:
        assert_same_bits(outputs["k_cache_out"], by_row["k"].astype(FP8))


@pytest.mark.parametrize("form", ["", "_split"])
@pytest.mark.parametrize("is_paged", [False, True])
def test_attention_reads_past_2_31_elements(
    interpreter: Interpreter, is_paged: bool, form: str
) -> None:
    """What is there is attended as it is at the beginning of a small cache."""
    generator = np.random.default_rng(0)
    inputs: dict[str, Array] = {
        "q": generator.standard_normal((1, HEADS, ROWS, HEAD_DIM)).astype(np.float32),
        "kv_scales": np.array([0.05, 0.5], np.float32),
    }
    attributes = {"block_size": ROWS, "is_causal": 1, "window": 60}
    if form:
        attributes["most_splits"] = 1
    else:
        inputs["sinks"] = np.zeros(HEADS, np.float32)
    held = {one: codes(generator, 64, HEADS, HEAD_DIM).astype(FP8) for one in "kv"}
    found = []
    for length, pages in ((128, 4), (LENGTH, PAGES)):
        cache: tuple[int, ...] = (1, HEADS, length, HEAD_DIM)
        own = inputs | {"key_value_lengths": np.array([length], np.int32)}
        written: dict[str, Any] = {
            f"{one}_cache": ((0, slice(None), slice(length - 64, length)), rows.swapaxes(0, 1))
            for one, rows in held.items()
        }
        if is_paged:
            cache = (pages, PAGE_SIZE, HEADS, HEAD_DIM)
            own["key_value_lengths"] = np.array([64], np.int32)
            own["page_table"] = np.array([[pages - 2, pages - 1]], np.int32)
            written = {
                f"{one}_cache": (slice(pages - 2, pages), rows.reshape(2, *cache[1:]))
                for one, rows in held.items()
            }
        operation = f"block_attention{form}{'_paged' * is_paged}_fp8"
        found.append(interpreter.call(run_sparse, operation, own, attributes, cache, written, []))
    near, far = found
    for name in near:
        assert near[name].astype(bool).any()
        assert_same_bits(far[name], near[name])

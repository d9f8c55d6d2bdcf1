"""What tests of kernels rest on: the measure of error, guards, and the interpreter's process."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import pytest
from dflash_plugins.operation import Launch, Operation, TensorSpec
from dflash_plugins.testing.guarded import Buffers, run_guarded
from dflash_plugins.testing.numeric import (
    GUARD_BYTES,
    GuardedBuffer,
    assert_same_bits,
    epsilon,
    find_mismatch,
    relative_error,
    sum_error,
)

from tests.plugins.interpreter import Interpreter


def test_the_first_wrong_coordinate_is_named() -> None:
    expected = np.ones((3, 4, 5))
    actual = expected.copy()
    actual[1, 2, 3] += 1e-3
    actual[2, 0, 0] = np.nan
    assert find_mismatch(actual, expected, 1e-4) == (
        "first at (1, 2, 3): 1.001 where 1.0 was expected (error 0.0005, bound 0.0001)"
    )
    assert find_mismatch(actual[:2], expected[:2], 1e-3) is None
    assert find_mismatch(actual, expected, 1e-3) == (
        "first at (2, 0, 0): nan where 1.0 was expected (error inf, bound 0.001)"
    )


def test_error_is_relative_to_a_value_and_to_its_row() -> None:
    expected = np.array([[1.0, 1.0, 0.0, 0.0]])
    rms = np.sqrt(0.5)
    error = relative_error(expected + 1e-3, expected)
    np.testing.assert_allclose(error, 1e-3 / np.array([[1 + rms, 1 + rms, rms, rms]]))


def test_infinities_must_be_where_they_are_expected() -> None:
    expected = np.array([[np.inf, -np.inf, np.nan, 0.0]])
    assert find_mismatch(expected.copy(), expected, 0.0) is None
    for index, wrong in enumerate((1.0, np.inf, 1.0)):
        actual = expected.copy()
        actual[0, index] = wrong
        mismatch = find_mismatch(actual, expected, 1e9)
        assert mismatch is not None and f"first at (0, {index}): " in mismatch


def test_bits_differ_where_values_are_equal() -> None:
    zeros = np.zeros((2, 2), np.float32)
    other = zeros.copy()
    other[1, 0] = -0.0
    with pytest.raises(AssertionError, match=r"first at \(1, 0\)"):
        assert_same_bits(other, zeros)


@pytest.mark.parametrize("length", [3, 64, 1000])
def test_a_sum_in_any_order_keeps_its_bound(length: int) -> None:
    """One by one, in lanes, and from the other end; a sum in a narrower type does not."""
    products = np.random.default_rng(length).standard_normal((2000, length)).astype(np.float32)
    lanes = np.pad(products, ((0, 0), (0, -length % 8))).reshape(2000, 8, -1)
    wide = products.astype(np.float64)
    bound = sum_error(length, (wide**2).sum(1), epsilon(np.float32))
    for order in (products, products[:, ::-1], lanes.cumsum(2)[:, :, -1]):
        error = np.abs(order.cumsum(1)[:, -1] - wide.sum(1))
        assert (error <= bound).all()
        assert error.max() > bound.mean() / 30
    narrow = products.astype(np.float16).cumsum(1, dtype=np.float32)[:, -1]
    assert (np.abs(narrow - wide.sum(1)) > bound).mean() > 0.9


@pytest.mark.parametrize(("offset", "where"), [(-1, "-1"), (0, None), (7, None), (8, "8")])
def test_a_byte_outside_is_noticed(offset: int, where: str | None) -> None:
    buffer = GuardedBuffer(8)
    assert (buffer.inner.view(np.float32) != buffer.inner.view(np.float32)).all()  # NaN
    buffer.memory[GUARD_BYTES + offset] ^= 1
    if where is None:
        buffer.check("x")
        return
    with pytest.raises(AssertionError, match=f"byte {where} of 8 was written"):
        buffer.check("x")


BLOCKS = {
    "token_ids": np.arange(6).reshape(2, 3),
    "choice_ids": np.arange(6).reshape(2, 3),
    "cache_start": np.array([4, 9]),
}


def test_outputs_that_nobody_writes_are_poison() -> None:
    outputs = run_guarded("accept", BLOCKS, {}, 0, lambda *launch: None)
    assert outputs["new_tokens"].tolist() == [[-1] * 3] * 2
    assert outputs["accepted"].dtype == np.int32


@pytest.mark.parametrize(
    ("tensor", "at", "message"),
    [
        ("bonus", -8, "bonus: byte -8 of 16 was written"),
        ("accepted", 8, "accepted: byte 8 of 8 was written"),
        ("choice_ids", 0, "choice_ids is an input only"),
    ],
)
def test_a_write_where_none_belongs_is_noticed(tensor: str, at: int, message: str) -> None:
    def write(
        operation: Operation, launch: Launch, specs: Mapping[str, TensorSpec], buffers: Buffers
    ) -> None:
        assert launch.grid == (2, 1, 1)
        assert list(specs) == [*BLOCKS, *operation.outputs]
        buffer = buffers[tensor]
        buffer.memory[buffer.offset + at] ^= 1

    with pytest.raises(AssertionError, match=message):
        run_guarded("accept", BLOCKS, {}, 0, write)


def test_nothing_is_launched_over_an_empty_grid() -> None:
    def refuse(*launch: object) -> None:
        raise AssertionError("launched")

    empty = {name: array[:0] for name, array in BLOCKS.items()}
    assert run_guarded("accept", empty, {}, 0, refuse)["bonus"].size == 0


def test_this_process_never_interprets(interpreter: Interpreter) -> None:
    triton = pytest.importorskip("triton")
    interpreter.run("accept", BLOCKS)
    assert "TRITON_INTERPRET" not in os.environ
    assert not triton.knobs.runtime.interpret

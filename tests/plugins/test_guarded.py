"""Guarded runs and the interpreter's process: what a kernel must not do is noticed."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import pytest
from dflash_plugins.operation import Launch, Operation, TensorSpec
from dflash_plugins.testing.guarded import Buffers, run_guarded
from dflash_plugins.testing.interpreter import Interpreter

INPUTS = {
    "token_ids": np.arange(6).reshape(2, 3),
    "choice_ids": np.arange(6).reshape(2, 3),
    "cache_start": np.array([4, 9]),
}


def test_outputs_that_nobody_writes_are_poison() -> None:
    outputs = run_guarded("accept", INPUTS, {}, 0, lambda *launch: None)
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
        assert list(specs) == [*INPUTS, *operation.outputs]
        buffer = buffers[tensor]
        buffer.memory[buffer.offset + at] ^= 1

    with pytest.raises(AssertionError, match=message):
        run_guarded("accept", INPUTS, {}, 0, write)


def test_nothing_is_launched_over_an_empty_grid() -> None:
    def refuse(*launch: object) -> None:
        raise AssertionError("launched")

    empty = {name: array[:0] for name, array in INPUTS.items()}
    assert run_guarded("accept", empty, {}, 0, refuse)["bonus"].size == 0


def test_this_process_never_interprets(interpreter: Interpreter) -> None:
    triton = pytest.importorskip("triton")
    interpreter.run("accept", INPUTS)
    assert "TRITON_INTERPRET" not in os.environ
    assert not triton.knobs.runtime.interpret


def test_errors_in_the_interpreters_process_arrive_here(interpreter: Interpreter) -> None:
    with pytest.raises(KeyError, match="no_such_operation"):
        interpreter.run("no_such_operation", {})

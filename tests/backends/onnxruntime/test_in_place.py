"""What a call touches and what it reuses: caches in place, bindings by shape, lengths by need."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.base import StepCall
from dflash_trt.backends.onnxruntime.caches import SPARE_CALLS
from dflash_trt.backends.onnxruntime.executor import MAX_BINDINGS, OnnxRuntimeExecutor
from tests.backends.steps import forward_rows, random_ids
from tests.inspection import arrays, binding_count, cache_length, count_calls, count_functions
from tests.pairs import PairFactory
from tests.reference.compare import assert_bitwise_equal

SENTINEL = np.float32(-7.25)
SLOTS = 4


@pytest.fixture
def executor(make_pair: PairFactory) -> OnnxRuntimeExecutor:
    return make_pair(max_batch=SLOTS).open()


@pytest.mark.parametrize(
    ("call", "first_slot", "starts", "rows"),
    [
        ("target", 1, [0], 5),
        ("target", 0, [9, 40, 3], 4),
        ("target", 2, [127, 0], 1),
        ("target_only", 1, [20, 64], 8),
        ("speculate", 1, [30, 2], 8),
        ("speculate", 3, [100], 2),
    ],
)
def test_a_call_writes_its_own_rows_and_not_one_byte_besides(
    executor: OnnxRuntimeExecutor, call: Any, first_slot: int, starts: list[int], rows: int
) -> None:
    owners = ("target",) if call == "target_only" else ("target", "draft")
    for array in arrays(executor).values():
        array[...] = SENTINEL
    addresses = {name: array.ctypes.data for name, array in arrays(executor).items()}
    if call == "speculate":
        executor.speculate(StepCall(first_slot, np.arange(len(starts)), np.array(starts), rows))
    else:
        ids = random_ids(256, len(starts), rows)
        forward_rows(executor, ids, starts, graph=call, first_slot=first_slot)
    for name, array in arrays(executor).items():
        assert array.ctypes.data == addresses[name], "moved"
        written = np.zeros(array.shape, bool)
        if name.startswith(owners):
            for b, start in enumerate(starts):
                written[first_slot + b, :, start : start + rows] = True
        untouched = np.full_like(array, SENTINEL)
        assert_bitwise_equal(array[~written], untouched[~written], f"{name} outside the rows")
        assert (array[written] != SENTINEL).all(), f"{name}: rows not written"


def test_decode_steps_reuse_one_binding(executor: OnnxRuntimeExecutor) -> None:
    sessions = count_calls(executor)
    for start in range(0, 60, 3):
        forward_rows(executor, random_ids(256, 2, 3), [start, start])
        forward_rows(executor, random_ids(256, 1, 1), [start], graph="target_only")
        executor.speculate(StepCall(0, np.array([1, 2]), np.array([start, start]), 4))
    bindings = {name: session.io_binding.call_count for name, session in sessions.items()}
    runs = {name: session.run_with_iobinding.call_count for name, session in sessions.items()}
    assert bindings == {"target": 2, "draft": 1, "target_only": 1}, (
        "forward and verify have each one"
    )
    assert runs == {"target": 40, "draft": 20, "target_only": 20}


def test_the_functions_of_a_step_are_bounded_at_any_batch(executor: OnnxRuntimeExecutor) -> None:
    """Behind a pass each function is fetched from memory anew."""
    for batch in (1, SLOTS):
        step = StepCall(0, np.arange(batch), np.full(batch, 9), 8)
        executor.speculate(step)
        assert count_functions("backends", partial(executor.speculate, step)) <= 20


def test_bindings_are_bounded_however_many_shapes_come(executor: OnnxRuntimeExecutor) -> None:
    ids = random_ids(256, 1, MAX_BINDINGS + 20)
    expected = forward_rows(executor, ids, [0])[0]
    for rows in range(1, MAX_BINDINGS + 20):
        logits = forward_rows(executor, ids[:, :rows], [0])[0]
        assert_bitwise_equal(logits, expected[:rows], f"{rows} rows")
        assert binding_count(executor) <= MAX_BINDINGS


def test_the_length_follows_the_tokens_held(executor: OnnxRuntimeExecutor) -> None:
    ids = random_ids(256, 1, 40)
    for start, length in [(0, 128), (88, 128), (89, 256), (217, 512), (472, 512)]:
        forward_rows(executor, ids, [start], first_slot=3)
        assert cache_length(executor) == length, f"after {start + 40} positions"
    forward_rows(executor, ids, [0], first_slot=0)
    assert cache_length(executor) == 512, "slot 3 still holds 512 positions"
    executor.release_slots(1)
    for _ in range(SPARE_CALLS):
        forward_rows(executor, ids, [40], first_slot=0)
        assert cache_length(executor) == 512, "another long one may come"
    forward_rows(executor, ids, [40], first_slot=0)
    assert cache_length(executor) == 256, "80 positions are held: too many for a quarter of 256"
    forward_rows(executor, ids, [0], first_slot=0)
    assert cache_length(executor) == 256, "run again, the first rows are not all that is held"
    executor.release_slots(0)
    for _ in range(SPARE_CALLS + 1):
        forward_rows(executor, ids, [0], first_slot=0)
    assert cache_length(executor) == 128

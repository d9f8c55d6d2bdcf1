"""What a call touches and what it reuses: caches in place, bindings by shape, lengths by need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dflash_trt.backends.base import Scores, StepCall, TargetCall, TargetGraph
from dflash_trt.backends.onnxruntime.executor import MAX_BINDINGS, OnnxRuntimeExecutor
from tests.backends.steps import count, forward_rows, one_step, random_ids, run_chunks
from tests.inspection import arrays, cache_length, loaded_graphs
from tests.pairs import PairFactory
from tests.reference.compare import assert_bitwise_equal

SENTINEL = np.float32(-7.25)
SLOTS = 4
Call = Callable[[OnnxRuntimeExecutor], object]


@pytest.fixture
def executor(make_pair: PairFactory) -> OnnxRuntimeExecutor:
    return make_pair(max_batch=SLOTS).open()


def forward(graph: TargetGraph, first_slot: int, starts: list[int], rows: int) -> Call:
    ids = random_ids(256, len(starts), rows)
    return lambda executor: forward_rows(executor, ids, starts, graph=graph, first_slot=first_slot)


def speculate(first_slot: int, starts: list[int], rows: int) -> Call:
    anchors = np.arange(len(starts))
    return lambda executor: executor.speculate(
        StepCall(first_slot, anchors, np.array(starts), rows)
    )


CALLS: list[tuple[Call, int, list[int], int, tuple[str, ...]]] = [
    (forward("target", 1, [0], 5), 1, [0], 5, ("target", "draft")),
    (forward("target", 0, [9, 40, 3], 4), 0, [9, 40, 3], 4, ("target", "draft")),
    (forward("target", 2, [127, 0], 1), 2, [127, 0], 1, ("target", "draft")),
    (forward("target_only", 1, [20, 64], 8), 1, [20, 64], 8, ("target",)),
    (speculate(1, [30, 2], 8), 1, [30, 2], 8, ("target", "draft")),
    (speculate(3, [100], 2), 3, [100], 2, ("target", "draft")),
]


@pytest.mark.parametrize("case", CALLS, ids=range(len(CALLS)))
def test_a_call_writes_its_own_rows_and_not_one_byte_besides(
    executor: OnnxRuntimeExecutor, case: tuple[Call, int, list[int], int, tuple[str, ...]]
) -> None:
    call, first_slot, starts, rows, owners = case
    for array in arrays(executor).values():
        array[...] = SENTINEL
    addresses = {name: array.ctypes.data for name, array in arrays(executor).items()}
    call(executor)
    for name, array in arrays(executor).items():
        assert array.ctypes.data == addresses[name], "moved"
        written = np.zeros(array.shape, bool)
        if name.startswith(owners):
            for b, start in enumerate(starts):
                written[first_slot + b, :, start : start + rows] = True
        untouched = np.full_like(array, SENTINEL)
        assert_bitwise_equal(array[~written], untouched[~written], f"{name} outside the rows")
        assert (array[written] != SENTINEL).all(), f"{name}: rows not written"


@pytest.mark.parametrize("graph", ["target", "target_only"])
def test_logits_come_only_when_wanted_and_choices_are_their_argmax(
    executor: OnnxRuntimeExecutor, graph: TargetGraph
) -> None:
    ids, starts, rows = random_ids(256, 2, 6), np.array([0, 0]), np.array([[5, 0], [3, 3]])
    plain = TargetCall(graph, 0, ids, starts, rows)
    output = executor.forward(replace(plain, scores=Scores.LOGITS))
    assert output.logits is not None
    assert (output.logits.shape, output.logits.dtype) == ((2, 2, 256), np.float32)
    choices = output.choice_ids.copy()
    np.testing.assert_array_equal(choices, output.logits.argmax(-1))
    without = executor.forward(plain)
    assert without.logits is None
    np.testing.assert_array_equal(without.choice_ids, choices)


def test_speculation_gives_logits_only_when_wanted(executor: OnnxRuntimeExecutor) -> None:
    anchors, starts = np.array([3, 4]), np.array([0, 0])
    wanted = executor.speculate(StepCall(0, anchors, starts, 5, Scores.LOGITS))
    assert wanted.logits is not None
    np.testing.assert_array_equal(wanted.choice_ids, wanted.logits.argmax(-1))
    np.testing.assert_array_equal(wanted.token_ids[:, 0], anchors)
    choices, tokens = wanted.choice_ids.copy(), wanted.token_ids.copy()
    unwanted = executor.speculate(StepCall(0, anchors, starts, 5))
    assert unwanted.logits is None
    np.testing.assert_array_equal(unwanted.choice_ids, choices)
    np.testing.assert_array_equal(unwanted.token_ids, tokens)


def test_a_speculative_step_verifies_what_the_draft_proposed(
    executor: OnnxRuntimeExecutor,
) -> None:
    prompt = random_ids(256, 20).tolist()
    run_chunks(executor, prompt, (20,))
    run_chunks(executor, prompt, (20,), slot=1)
    step = executor.speculate(StepCall(0, np.array([7]), np.array([20]), 8, Scores.LOGITS))
    assert step.logits is not None
    expected = step.logits[0].copy()
    block = step.token_ids[0].tolist()
    assert_bitwise_equal(run_chunks(executor, block, (8,), slot=1, start=20), expected, "verify")


def test_decode_steps_reuse_one_binding(executor: OnnxRuntimeExecutor) -> None:
    sessions = count(executor)
    for start in range(0, 60, 3):
        forward_rows(executor, random_ids(256, 2, 3), [start, start])
        forward_rows(executor, random_ids(256, 1, 1), [start], graph="target_only")
        executor.speculate(StepCall(0, np.array([1, 2]), np.array([start, start]), 4))
    assert sessions["target"].bindings == 2, "one for forward, one for verify"
    assert sessions["draft"].bindings == 1
    assert sessions["target_only"].bindings == 1
    assert sessions["target"].runs == 40
    assert sessions["draft"].runs == 20


def test_growth_makes_new_bindings_once(executor: OnnxRuntimeExecutor) -> None:
    sessions = count(executor)
    ids = random_ids(256, 300)
    run_chunks(executor, ids.tolist(), (10,))
    assert cache_length(executor) == 512
    assert sessions["target"].bindings == 3, "at lengths 128, 256, 512"


def test_bindings_are_bounded_however_many_shapes_come(executor: OnnxRuntimeExecutor) -> None:
    ids = random_ids(256, 1, MAX_BINDINGS + 20)
    expected = forward_rows(executor, ids, [0])[0]
    for rows in range(1, MAX_BINDINGS + 20):
        logits = forward_rows(executor, ids[:, :rows], [0])[0]
        assert_bitwise_equal(logits, expected[:rows], f"{rows} rows")
        assert len(executor._bindings) <= MAX_BINDINGS


def test_the_length_follows_the_tokens_held(executor: OnnxRuntimeExecutor) -> None:
    ids = random_ids(256, 1, 40)
    for start, length in [(0, 128), (88, 128), (89, 256), (217, 512), (472, 512)]:
        forward_rows(executor, ids, [start], first_slot=3)
        assert cache_length(executor) == length, f"after {start + 40} positions"
    forward_rows(executor, ids, [0], first_slot=0)
    assert cache_length(executor) == 512, "slot 3 still holds 512 positions"
    executor.release_slots(1)
    forward_rows(executor, ids, [40], first_slot=0)
    assert cache_length(executor) == 256, "80 positions are held: too many for a quarter of 256"
    forward_rows(executor, ids, [0], first_slot=0)
    assert cache_length(executor) == 256, "run again, the first rows are not all that is held"
    executor.release_slots(0)
    forward_rows(executor, ids, [0], first_slot=0)
    assert cache_length(executor) == 128


def test_a_moved_sequence_counts_as_held(executor: OnnxRuntimeExecutor) -> None:
    ids = random_ids(256, 300).tolist()
    run_chunks(executor, ids, (100,), slot=3)
    executor.move_slot(3, 0, 300)
    executor.release_slots(1)
    forward_rows(executor, [[1]], [0], first_slot=1)
    assert cache_length(executor) == 512


def test_the_last_position_of_the_context_can_be_used(make_pair: PairFactory) -> None:
    """A limit that is no multiple of the length step included."""
    executor = make_pair(max_seq_len=150, max_batch=2).open()
    ids = random_ids(256, 150).tolist()
    logits = run_chunks(executor, ids, (47,))
    executor.speculate(one_step(8, anchor=3, start=142))
    alone = make_pair(max_batch=SLOTS).open()
    assert_bitwise_equal(logits, run_chunks(alone, ids, (150,)), "another limit")


def test_plain_decoding_opens_neither_the_draft_nor_the_injecting_target(
    executor: OnnxRuntimeExecutor,
) -> None:
    forward_rows(executor, [[1, 2]], [0], graph="target_only")
    assert loaded_graphs(executor) == {"target_only"}

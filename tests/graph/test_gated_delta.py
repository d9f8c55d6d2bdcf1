"""A Gated DeltaNet layer's recurrence: float64's numbers, and one pass's bits however it is cut."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from dflash_trt.graph.gated_delta import IDLE
from dflash_trt.graph.gated_delta_groups import SMALLEST_GROUP
from dflash_trt.models.sizes import RecurrentSizes
from tests.covering import exhaustive
from tests.graph.delta import DeltaStep, FloatArray, Held
from tests.reference.compare import assert_bitwise_equal, max_relative_error

Check = Callable[[FloatArray, FloatArray, str], None]
LENGTH = 90
SHAPES = {
    "as_9b": RecurrentSizes(2, 4, 16, 4),
    "as_27b": RecurrentSizes(1, 3, 32, 4),
    "equal_heads": RecurrentSizes(3, 3, 8, 4),
    "short_kernel": RecurrentSizes(2, 8, 16, 2),
    "true_heads": RecurrentSizes(1, 3, 128, 4),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", SHAPES)
def test_numbers_are_those_of_a_float64_recurrence(name: str) -> None:
    step = DeltaStep(SHAPES[name], replay=8)
    rows = step.normal(2, LENGTH, SHAPES[name].row_elements)
    y, _ = step.run(rows, np.zeros(2, np.int64), step.fresh(2))
    for got, sequence in zip(y, rows, strict=True):
        assert max_relative_error(got, step.reference(sequence)) <= 1e-5


@pytest.mark.parametrize(
    ("name", "replay", "trials"),
    [
        ("as_9b", 8, 10),
        ("as_27b", 16, 5),
        ("equal_heads", 2, 5),
        ("short_kernel", 3, 5),
    ],
)
def test_chunks_blocks_rejections_and_slots_change_no_bit(
    name: str, replay: int, trials: int
) -> None:
    """Two sequences a trial."""
    check_cuts(DeltaStep(SHAPES[name], replay, seed=replay), trials)


def check_cuts(step: DeltaStep, trials: int, check: Check = assert_bitwise_equal) -> None:
    """Random chunks, blocks, rejections and moves, compared with one pass over the whole text."""
    rng, replay = random.Random(step.replay), step.replay
    for _ in range(trials):
        rows = step.normal(2, LENGTH, step.sizes.row_elements)
        whole, _ = step.run(rows, np.zeros(2, np.int64), step.fresh(2))
        order, parts = [0, 1], []
        starts = np.zeros(2, np.int64)
        held: Held | None = None
        for index in range(2):  # each its own prompt chunks, alone
            one, end, at = step.fresh(1), rng.randrange(1, 40), 0
            while at < end:
                count = min(rng.randrange(1, 25), end - at)
                y, one = step.run(rows[index : index + 1, at : at + count], np.array([at]), one)
                parts.append((index, at, y[0]))
                at += count
            starts[index] = end
            held = one if held is None else held.join(one)
        assert held is not None
        while (size := rng.randrange(1, replay + 1)) + starts.max() <= LENGTH:
            block = np.stack(
                [rows[who, at : at + size] for who, at in zip(order, starts, strict=True)]
            )
            kept = [rng.randrange(1, size + 1) for _ in order]
            for slot, accepted in enumerate(kept):
                block[slot, accepted:] = step.normal(*block[slot, accepted:].shape) * 3
            y, held = step.run(block, starts, held)
            for slot, accepted in enumerate(kept):
                parts.append((order[slot], int(starts[slot]), y[slot, :accepted]))
            starts = starts + kept
            if rng.random() < 0.2:
                held, order, starts = held.pick([1, 0]), order[::-1], starts[::-1].copy()
        for index, at, y in parts:
            check(y, whole[index, at : at + len(y)], f"rows at {at}")


BOUND, GROUPS_LENGTH = 1e-5, 3 * SMALLEST_GROUP + 5
"""In groups, as engines have it."""


def make_step(name: str, replay: int) -> DeltaStep:
    return DeltaStep(SHAPES[name], replay, seed=replay, in_groups=True)


def assert_close(got: FloatArray, want: FloatArray, what: str) -> None:
    assert np.abs(got - want).max() <= BOUND, f"{what} differ"


@pytest.mark.parametrize("name", SHAPES)
def test_numbers_in_groups_are_those_of_a_float64_recurrence(name: str) -> None:
    """Of one key again and again too, all of it taken and nothing forgotten."""
    step, sizes = make_step(name, 8), SHAPES[name]
    rows = step.normal(2, GROUPS_LENGTH, sizes.row_elements)
    rows[1] = rows[1, :1]
    rows[1, :, sizes.channels :] = np.repeat([9, -30], sizes.value_heads)
    y, _ = step.run(rows, np.zeros(2, np.int64), step.fresh(2))
    for got, sequence in zip(y, rows, strict=True):
        assert max_relative_error(got, step.reference(sequence)) <= BOUND


@pytest.mark.parametrize(
    ("name", "replay"),
    [
        ("as_9b", 8),
        *(exhaustive(name, replay) for name in SHAPES for replay in (2, 20)),
    ],
)
def test_chunks_blocks_rejections_and_slots_change_no_number(name: str, replay: int) -> None:
    check_cuts(make_step(name, replay), 4, assert_close)


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_an_idle_sequence_keeps_every_bit(rows: int) -> None:
    """Beside one that runs, whose bits do not depend on it."""
    step = make_step("as_9b", 8)
    held = step.fresh(2)
    held.state_start[:], held.rows_end[:] = 30, 34
    held.rows_end[1] = IDLE
    x, starts = step.normal(2, rows, step.sizes.row_elements), np.array([32, 900])
    y, after = step.run(x, starts, held)
    assert_bitwise_equal(after.state[1], held.state[1], "state")
    assert_bitwise_equal(after.rows[1], held.rows[1], "rows")
    alone, _ = step.run(x[:1], starts[:1], held.pick([0]))
    assert_bitwise_equal(y[:1], alone, "rows of the other")
    assert not np.array_equal(after.state[0], held.state[0])

"""The recurrence in groups, as engines have it: float64's numbers, however a text is cut."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.graph.gated_delta import IDLE
from dflash_trt.graph.gated_delta_groups import SMALLEST_GROUP
from tests.covering import exhaustive
from tests.graph.delta import DeltaStep, FloatArray
from tests.graph.test_gated_delta import SHAPES, check_cuts
from tests.reference.compare import assert_bitwise_equal, max_relative_error

LENGTH = 3 * SMALLEST_GROUP + 5
BOUND = 1e-5


def make_step(name: str, replay: int) -> DeltaStep:
    return DeltaStep(SHAPES[name], replay, seed=replay, in_groups=True)


def assert_close(got: FloatArray, want: FloatArray, what: str) -> None:
    assert np.abs(got - want).max() <= BOUND, f"{what} differ"


@pytest.mark.parametrize("name", SHAPES)
def test_numbers_are_those_of_a_float64_recurrence(name: str) -> None:
    """Of one key again and again too, all of it taken and nothing forgotten."""
    step, sizes = make_step(name, 8), SHAPES[name]
    rows = step.normal(2, LENGTH, sizes.row_elements)
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

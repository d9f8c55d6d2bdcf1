"""The kernel of Gated DeltaNet layers, interpreted, against its definition and in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from dflash_plugins.gated_delta_step.checks import (
    PLACES,
    Place,
    check_case,
    make_inputs,
    public_groups,
)
from dflash_plugins.gated_delta_step.launch import CHUNKS, STEP, make_case
from dflash_plugins.gated_delta_step.reference import expect
from dflash_plugins.operation import Attributes
from dflash_plugins.testing.guarded import Arrays
from dflash_plugins.testing.numeric import Array

from dflash_trt.errors import DflashError
from dflash_trt.models.sizes import RecurrentSizes
from tests.covering import exhaustive
from tests.graph.delta import DeltaStep, Held
from tests.plugins.interpreter import Interpreter, assert_close, assert_same_bits

SMALL = RecurrentSizes(1, 1, 16, 4)
NAME = "gated_delta_step"


@pytest.mark.parametrize(
    ("sizes", "count", "places"),
    [
        (SMALL, 3, PLACES[::2]),
        exhaustive(SMALL, 1, PLACES),
        exhaustive(SMALL, 20, PLACES),
        exhaustive(RecurrentSizes(2, 4, 16, 2), 4, PLACES),
        exhaustive(RecurrentSizes(2, 2, 32, 3), 17, PLACES[2:4]),
        exhaustive(RecurrentSizes(1, 1, 16, 1), 2, PLACES[2:]),
        *(exhaustive(sizes, 2, PLACES[4:]) for sizes in public_groups(1)),
    ],
)
def test_kernel_is_its_definition_and_within_its_bound(
    interpreter: Interpreter, sizes: RecurrentSizes, count: int, places: Sequence[Place]
) -> None:
    """What a row must not depend on is NaN for the kernel. The definition multiplies it by 0."""
    step = DeltaStep(sizes, 16, has_sides=True)
    case = make_case("", sizes, batch=len(places), count=count, held=step.kept)
    inputs = make_inputs(case, places)
    outputs, expected = interpreter.run(NAME, inputs, case.attributes), expect(inputs, 16)
    check(outputs, expected)
    step.weights = {name: inputs[name] for name in step.weights}
    rows, state = (np.nan_to_num(inputs[name]) for name in ("rows", "state"))
    held = Held(rows, state, inputs["state_start"], inputs["rows_end"], inputs["side"])
    y, after = step.run(inputs["new_rows"], inputs["start"], held)
    assert_close(y, expected.y, expected.y_bound)
    assert_close(after.state, expected.state_out, expected.state_bound)
    assert_same_bits(np.nan_to_num(outputs["rows_out"]), after.rows)


def check(outputs: Mapping[str, Array], expected: Any) -> None:
    assert_close(outputs["y"], expected.y, expected.y_bound)
    assert_close(outputs["state_out"], expected.state_out, expected.state_bound)
    assert_same_bits(outputs["rows_out"], expected.rows_out)


@pytest.mark.parametrize(
    ("sizes", "count", "places"),
    [
        (SMALL, 19, PLACES[4:5]),
        exhaustive(SMALL, 16, PLACES),
        exhaustive(SMALL, 40, PLACES[:-1]),
        exhaustive(RecurrentSizes(2, 4, 32, 2), 4, PLACES),
        *(exhaustive(sizes, 18, PLACES[4:-1]) for sizes in public_groups(1)),
    ],
)
def test_chunks_compute_the_same(
    interpreter: Interpreter, sizes: RecurrentSizes, count: int, places: Sequence[Place]
) -> None:
    """Replayed rows and new ones in one chunk, a state kept between two, an idle sequence."""
    case = make_case("", sizes, batch=len(places), count=count)
    inputs = make_inputs(case, places)
    check(interpreter.run(NAME, inputs, case.attributes, CHUNKS), expect(inputs, 16))


def test_more_open_rows_than_a_chunk_has_leave_the_settled_state(interpreter: Interpreter) -> None:
    """Of blocks of more than 16 rows: a chunk of those that may be taken back must not store it."""
    case = make_case("", SMALL, batch=1, count=17, replay=17)
    inputs = make_inputs(case, [Place(3, 2, 7)])
    check(interpreter.run(NAME, inputs, case.attributes, CHUNKS), expect(inputs, 17))


def test_a_row_that_may_be_taken_back_reaches_no_state(interpreter: Interpreter) -> None:
    """Not even one of NaN, which lies in a tile with the rows that settle."""
    case = make_case("", SMALL, batch=1, count=3)
    inputs = make_inputs(case, [Place(3, 2, 1)])
    known = interpreter.run(NAME, inputs, case.attributes, CHUNKS)
    inputs["new_rows"][:, 1:] = np.nan
    found = interpreter.run(NAME, inputs, case.attributes, CHUNKS)
    assert_same_bits(found["state_out"], known["state_out"])
    assert np.isnan(found["y"][0, 0]).any(), "else the rows were in no tile with the others"


def test_a_wrong_kernel_is_noticed(interpreter: Interpreter) -> None:
    """One that forgets a row of its replay; and products of float16, by the bound alone."""
    case = make_case("", SMALL, batch=len(PLACES), count=1)

    def forgetful(name: str, inputs: Arrays, attributes: Attributes, tactic: int) -> Arrays:
        ahead = np.minimum(inputs["state_start"] + 1, inputs["start"])
        return interpreter.run(name, {**inputs, "state_start": ahead}, attributes, tactic)

    _, *found = check_case(case, STEP, forgetful)
    assert all(one.mismatch is not None for one in found)
    inputs = make_inputs(case, PLACES)
    expected = expect(inputs, 16)
    for name in ("new_rows", "state", "kernel"):
        narrow = inputs | {name: inputs[name].astype(np.float16).astype(np.float32)}
        with pytest.raises(AssertionError, match="first at"):
            assert_close(expect(narrow, 16).y, expected.y, expected.y_bound)


def test_what_no_kernel_does_is_refused() -> None:
    for sizes, reason in (
        (RecurrentSizes(1, 1, 96, 4), "head size 96, only 16, 32, 64, 128"),
        (RecurrentSizes(1, 1, 128, 5), "convolves up to 4 rows, not 5"),
    ):
        with pytest.raises(DflashError, match=reason):
            make_case("", sizes, batch=1, count=1).launch()

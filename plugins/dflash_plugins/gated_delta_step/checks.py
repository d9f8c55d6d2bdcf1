"""The check of `gated_delta_step` on a GPU: float64's numbers, bits, and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from dflash_plugins.gated_delta_step.launch import CHUNKS, TACTICS, make_case
from dflash_plugins.gated_delta_step.reference import expect
from dflash_plugins.operation import Case, DType
from dflash_plugins.public import recurrences
from dflash_plugins.testing.gpu import Point
from dflash_plugins.testing.guarded import Arrays
from dflash_plugins.testing.numeric import (
    Accuracy,
    Array,
    Check,
    Run,
    exact,
    fill,
    find_other_bits,
    judge,
)
from dflash_trt.hardware.kernels import SIDES
from dflash_trt.models.sizes import RecurrentSizes


@dataclass(frozen=True, slots=True)
class Place:
    """A sequence's `start`, rows before it that are run again, rows after it that were rejected."""

    start: int
    pending: int = 0
    rejected: int = 0
    is_idle: bool = False


IDLE = Place(30, is_idle=True)
PLACES = (Place(0), Place(2, 2), Place(40), Place(50, 16), Place(61, 3, 13), Place(70, 1, 5), IDLE)
"""A fresh slot, one whose state has taken nothing, nothing to replay, the most, and rejections; and
an idle sequence."""

BITS_SIZES = RecurrentSizes(1, 2, 128, 4)


def public_groups(key_heads: int) -> list[RecurrentSizes]:
    """`key_heads` of each public hybrid, with their value heads: the others are more programs."""
    groups = sorted({one.value_heads // one.key_heads for one in recurrences().values()})
    return [RecurrentSizes(key_heads, key_heads * group, 128, 4) for group in groups]


TENSOR_CORES = 4
"""Products of parts may lack a float32 product's last bit, and tensor cores may truncate sums."""


def make_inputs(case: Case, places: Sequence[Place], seed: int = 0) -> dict[str, Array]:
    """Random inputs of `case`; what no row may depend on is NaN.

    That is what a fresh slot's last sequence left, rows that were rejected, and those that neither
    the replay nor its convolution reaches.
    """
    inputs = fill(case.inputs, seed)
    inputs["kernel"] *= np.float32(0.5)
    inputs["decay"] = -np.exp(inputs["decay"])
    sides = np.arange(len(places)) % SIDES
    starts = np.array([place.start for place in places])
    settled = starts - [place.pending for place in places]
    ends = starts + [place.rejected for place in places]
    ends[[place.is_idle for place in places]] = -1
    inputs |= {"start": starts, "state_start": settled, "rows_end": ends, "side": sides}
    held, taps = inputs["rows"].shape[2], inputs["kernel"].shape[2]
    for b, place in enumerate(places):
        positions = np.arange(ends[b] - held, ends[b])
        needed = (positions >= max(0, settled[b] - taps + 1)) & (positions < place.start)
        inputs["rows"][b, sides[b], ~needed] = inputs["rows"][b, 1 - sides[b]] = np.nan
        if settled[b] == 0:
            inputs["state"][b] = np.nan
    return inputs


def checks() -> list[Check]:
    """Public heads, steps of 1 to 16 rows and chunks, rows in three types, each tactic; bits."""
    types = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
    found = [Check("gated_delta_step, bits", check_bits)]
    for sizes, count, dtype, tactic in product(
        public_groups(2), (1, 5, 16, 17, 100), types, TACTICS
    ):
        heads = f"{sizes.key_heads}/{sizes.value_heads} heads"
        title = f"gated_delta_step, {heads}, {count} rows in {dtype.kernel_name}, tactic {tactic}"
        # By chunks an idle sequence has outputs of what is left to replay alone: of a step's rows.
        batch = len(PLACES) - (tactic == CHUNKS and count > 16)
        case = make_case(title, sizes, batch=batch, count=count, dtype=dtype)
        found.append(Check(title, partial(check_case, case, tactic)))
    return found


def check_case(case: Case, tactic: int, run: Run) -> list[Accuracy]:
    """y and the state against float64, and the rows that are kept."""
    inputs = make_inputs(case, PLACES[: case.inputs["state"].shape[0]])
    outputs = run("gated_delta_step", inputs, case.attributes, tactic=tactic)
    expected = expect(inputs, case.attributes["replay"])
    wrong = find_other_bits(outputs["rows_out"], expected.rows_out)
    scale = TENSOR_CORES if tactic == CHUNKS else 1
    state = outputs["state_out"], expected.state_out, expected.state_bound * scale
    return [
        exact(f"{case.name}, rows", [wrong] if wrong else []),
        judge(case.name, outputs["y"], expected.y, expected.y_bound * scale),
        judge(f"{case.name}, state", *state),
    ]


def check_bits(run: Run, sizes: RecurrentSizes = BITS_SIZES) -> Accuracy:
    """Whether a text has the same bits in one call and in several, with rejected rows between."""
    replay, length = 8, 40
    case = make_case("", sizes, batch=1, count=length, replay=replay)
    inputs = make_inputs(case, [Place(0)])
    whole = run("gated_delta_step", inputs, case.attributes)["y"]
    found, at = [], 0
    held: Arrays = {name: inputs[name] for name in ("rows", "state")}
    settled = end = side = 0
    for count, kept in ((11, 11), (8, 3), (5, 1), (8, 8), (1, 1), (8, 8), (8, 8)):
        new = inputs["new_rows"][:, at : at + count].copy()
        new[:, kept:] = 3.0
        starts = {"start": at, "state_start": settled, "rows_end": end, "side": side}
        places = {name: np.array([value]) for name, value in starts.items()}
        given = {**inputs, **held, **places, "new_rows": new}
        outputs = run("gated_delta_step", given, case.attributes)
        if outputs["y"][:, :kept].tobytes() != whole[:, at : at + kept].tobytes():
            found.append(f"rows from {at} on depend on how the text is cut")
        held = {"rows": outputs["rows_out"], "state": outputs["state_out"]}
        settled, end, side = max(at, at + count - replay), at + count, 1 - side
        at += kept
    return exact("gated_delta_step, bits", found)


ROWS = ((1, 1), (1, 16), (8, 16), (64, 16), (1, 512))
"""(Sequences, rows of each): a plain step, verify steps, a prefill chunk."""
PENDING = 6
"""Rows that a verify step runs again: those that a public draft has accepted."""


def points() -> list[Point]:
    """Every public hybrid's heads, with rows in bfloat16.

    The state is read and written; of old rows one side is read and one written; the call's rows.
    """
    found = []
    for name, sizes in recurrences().items():
        for batch, count in ROWS:
            title = f"{name}, {batch} × {count} rows"
            case = make_case(title, sizes, batch=batch, count=count, dtype=DType.BFLOAT16)
            start = count + case.inputs["rows"].shape[2]
            place = Place(start, PENDING if count > 1 else 1)
            moved = 2 * case.inputs["state"].nbytes + case.inputs["rows"].nbytes
            moved += case.inputs["new_rows"].nbytes + case.outputs["y"].nbytes
            found.append(Point([case], partial(make_inputs, case, [place] * batch), moved))
    return found

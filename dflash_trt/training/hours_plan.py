"""What the hours pay for: the speeds of one measured minute, and fixed shares of the time."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from dflash_trt.errors import DflashError
from dflash_trt.training.training_request import TrainRequest

ANSWER_SHARE, TRAINING_SHARE, REST_SHARE = 0.35, 0.45, 0.20
"""Of the hours: for answers and features, for training (which helps more than more data), and for
measurements (half of it), the build, the proof and a machine slowed down."""
MAX_EPOCHS = 40
LEAST_MEASUREMENTS, MOST_MEASUREMENTS = 4, 20
"""Of a training, however short: else nothing could be chosen from."""
LEAST_ROWS, LEAST_STEPS = 8, 20
HELD_OUT_SHARE, LEAST_HELD_OUT = 0.1, 16
"""Of the answered prompts, those to measure on; and how few of them are no noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was measured: seconds to answer a prompt, to compute its features, to train a step and
    to build a bundle; and the tokens of a row, on average."""

    answer_s: float
    features_s: float
    step_s: float
    build_s: float
    row_tokens: float

    @property
    def row_s(self) -> float:
        return self.answer_s + self.features_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How many prompts and steps; `rates` is None where both were given.

    Args:
        rows: prompts to train on, of `available`.
        held_out: prompts to measure on, the first so many of those that are held out.
        evaluation_steps: after so many steps the draft is measured.
    """

    hours: float
    rows: int
    available: int
    held_out: int
    steps: int
    steps_per_epoch: int
    evaluation_steps: int
    rates: Rates | None

    @property
    def epochs(self) -> float:
        return self.steps / self.steps_per_epoch

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "epochs": self.epochs}


def check_hours(request: TrainRequest, row_s: float = 0.0, step_s: float = 0.0) -> None:
    """Raises DflashError where the hours pay for nothing, by what is known of `Rates`."""
    least_rows = (LEAST_ROWS + LEAST_HELD_OUT) * row_s / ANSWER_SHARE
    needed, hours = max(least_rows, LEAST_STEPS * step_s / TRAINING_SHARE) / 3600, request.hours
    if request.rows is None and request.steps is None and needed > hours:
        raise DflashError(
            f"{hours:g} h are too few on this machine: {LEAST_ROWS} prompts and {LEAST_STEPS} "
            f"steps would take {needed:.2g} h",
            where="--hours",
            fix="give more, or --set answer-tokens lower, or rows and steps yourself",
        )


def make_plan(
    request: TrainRequest, rates: Rates | None, available: int, held_out: int, batch_rows: int
) -> Plan:
    """The plan; without `rates`, `rows` and `steps` must have been given.

    Args:
        available, held_out: prompts to train on, and to measure on.
        batch_rows: rows of a step.

    Raises:
        DflashError: the hours pay for nothing; says how many would do.
    """
    hours, rows, steps = request.hours, request.rows, request.steps
    budget = hours * 3600
    if rates is not None:
        check_hours(request, rates.row_s, rates.step_s)
    answered = rows or available
    if rows is None and rates is not None:
        answered = min(int(ANSWER_SHARE * budget / rates.row_s), available + held_out)
    if not request.held_out:
        held_out = min(held_out, max(LEAST_HELD_OUT, round(HELD_OUT_SHARE * answered)))
    rows = min(rows or max(answered - held_out, LEAST_ROWS), available)
    per_epoch, measurements = math.ceil(rows / batch_rows), MOST_MEASUREMENTS
    if rates is not None:
        paid = int(TRAINING_SHARE * budget / rates.step_s)
        steps = steps or max(min(paid, MAX_EPOCHS * per_epoch), LEAST_STEPS)
        # A replay computes the features of the held-out rows, and the draft besides.
        replay_s = rates.build_s + 2 * held_out * rates.features_s
        measurements = min(measurements, int(REST_SHARE / 2 * budget / replay_s))
    assert steps is not None
    measurements = max(min(measurements, steps // per_epoch), LEAST_MEASUREMENTS)
    return Plan(
        hours=hours,
        rows=rows,
        available=available,
        held_out=held_out,
        steps=steps,
        steps_per_epoch=per_epoch,
        evaluation_steps=math.ceil(steps / measurements),
        rates=rates,
    )

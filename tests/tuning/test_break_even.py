"""Break-even: what steps with drafts cost, what they bring, and when that is said.

That `generate` and `verify` say it is tested in tests/cli, that a server does in tests/serving.
"""

from __future__ import annotations

import pytest

from dflash_trt.decoding import RequestStatistics
from dflash_trt.decoding.schedule import BlockSchedule, merge_ranges
from dflash_trt.decoding.statistics import StatisticsRecorder
from dflash_trt.decoding.tuning.break_even import (
    DraftedSteps,
    low_acceptance,
    schedule_break_even,
    timed_break_even,
)
from tests.decoding.schedules import invent_measurements

# Block 8 takes 1.7 plain steps of one sequence, block 4 1.1.
MEASURED = invent_measurements([4, 8], per_row=0.15)
SCHEDULE = BlockSchedule(blocks=merge_ranges([8]), executor="cpu", measured=MEASURED)


def steps_of(*emitted: int, block: int = 8, plain: int = 0) -> RequestStatistics:
    """A request whose drafted steps emitted so many tokens, with plain steps between."""
    recorder = StatisticsRecorder(submitted_at=0.0)
    for tokens in emitted:
        recorder.record_step(block, tokens, tokens)
    for _ in range(plain):
        recorder.record_step(1, 1, 1)
    return recorder.freeze(4, 1 + sum(emitted) + plain)


def test_what_a_step_costs() -> None:
    assert schedule_break_even(SCHEDULE, 8) == pytest.approx(1.7)
    assert schedule_break_even(SCHEDULE, 6) == pytest.approx(1.4)  # between 4 and 8
    assert schedule_break_even(SCHEDULE, 1) == 1
    untimed = BlockSchedule(blocks=merge_ranges([8]), executor="cpu")
    assert schedule_break_even(untimed, 8) is schedule_break_even(None, 8) is None
    steps = DraftedSteps(steps_of(3, 1))
    assert timed_break_even(steps, [0.5, 0.8]) == pytest.approx(2.5)
    assert timed_break_even(steps, []) is None


def test_plain_steps_do_not_count() -> None:
    steps = DraftedSteps(steps_of(3, 5, plain=90), steps_of(1, block=2, plain=1))
    assert (steps.count, steps.length, steps.block) == (3, 3.0, 1 + (7 + 7 + 1) / 3)


@pytest.mark.parametrize(
    ("emitted", "break_even", "is_said"),
    [
        ((1,) * 32, 1.7, True),
        ((1,) * 31, 1.7, False),  # too few
        ((1,) * 32, None, False),  # nobody knows what a step costs
        ((2,) * 32, 1.7, False),
        ((1, 2) * 60, 1.7, True),
        ((1, 8, 1, 1, 1, 1) * 10, 2.5, False),  # 2.17, which may be chance
        ((1, 8, 1, 1, 1, 1) * 200, 2.5, True),
    ],
)
def test_what_is_said(emitted: tuple[int, ...], break_even: float | None, is_said: bool) -> None:
    line = low_acceptance(DraftedSteps(steps_of(*emitted)), break_even, "my-bundle")
    assert (line is not None) == is_said
    if line is not None:
        mean = sum(emitted) / len(emitted)
        assert line == (
            f"acceptance length {mean:.2f} stays below break-even {break_even:.2f}: "
            "`dflash-trt diagnose my-bundle --prompts FILE` says why"
        )

"""Measuring on an executor with a model known by heart, and schedules from invented times."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt.decoding import Generator, GeneratorOptions, Request, RequestStatistics
from dflash_trt.decoding.drafter_kinds import PROMPT_LOOKUP
from dflash_trt.decoding.loops import LOOP_TIMES, LOOP_TOKENS, is_looping, loop_end
from dflash_trt.decoding.schedule import BlockSchedule, Measurements, StepPrediction, merge_ranges
from dflash_trt.decoding.statistics import StatisticsRecorder
from dflash_trt.decoding.tuning import block_times as blocks
from dflash_trt.decoding.tuning.block_times import (
    TuningOptions,
    derive_schedule,
    measure,
)
from dflash_trt.decoding.tuning.break_even import (
    DraftedSteps,
    low_acceptance,
    schedule_break_even,
    timed_break_even,
    tuned_ratio,
)
from dflash_trt.errors import DflashError
from tests.decoding.schedules import invent_measurements
from tests.pairs import SilentProgress
from tests.standins.executor import FakeExecutor

BLOCKS = (2, 4, 8)
LIMITS = FakeExecutor(max_batch=8).limits


def requests(count: int, tokens: int) -> list[Request]:
    return [Request(prompt_ids=(index, 3, 1), max_tokens=tokens) for index in range(count)]


def test_acceptance_is_that_of_every_block_and_steps_of_every_batch_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "STEPS_SECONDS", 0.0)
    executor = FakeExecutor(max_batch=4, draft_skill=0.75)
    options = TuningOptions(block_sizes=BLOCKS, batches=(1, 3), rounds=2)
    measured = measure(executor, requests(16, 50), options, SilentProgress())
    assert (measured.prompts, measured.max_tokens) == (16, 50)
    assert [len(rates) for rates in measured.acceptance] == [1, 3, 7]
    for rates in measured.acceptance:
        assert rates[0] == pytest.approx(0.75, abs=0.08)
    assert sorted(measured.acceptance_lengths) == measured.acceptance_lengths
    assert [step.batch for step in measured.steps] == [1, 3]
    timed = {(call.kind, call.sequences, call.rows) for call in executor.calls}
    for batch in (1, 3):
        assert {("target_only", batch, 1), ("target", batch, 1)} <= timed
        assert {("speculate", batch, block) for block in BLOCKS} <= timed
    assert 3 + 10 < measured.positions < 3 + 40, "prompts and half of their outputs"


def test_what_is_looked_up_is_measured_on_the_plain_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps that find nothing are among those that the expected tokens and seconds are of."""
    monkeypatch.setattr(blocks, "STEPS_SECONDS", 0.0)
    executor = FakeExecutor(max_batch=2, vocab_size=4)
    options = TuningOptions(block_sizes=BLOCKS, batches=(1,), rounds=1, drafter=PROMPT_LOOKUP)
    measured = measure(executor, requests(4, 50), options, SilentProgress())
    assert {call.kind for call in executor.calls} == {"target_only", "move"}
    expected = StepPrediction(measured, "target_only", 8)
    assert [expected.tokens(block) for block in BLOCKS] == pytest.approx(
        measured.acceptance_lengths, rel=0.03
    )
    schedule = derive_schedule(measured, executor.limits, executor="fake", drafter=PROMPT_LOOKUP)
    assert (schedule.drafter, schedule.plain_graph) == (PROMPT_LOOKUP, "target_only")
    followed = GeneratorOptions(schedule=schedule, drafter=PROMPT_LOOKUP)
    Generator(executor, options=followed).generate(requests(2, 20))
    assert {call.kind for call in executor.calls} == {"target_only", "move"}
    with pytest.raises(DflashError, match="is for prompt lookup drafts"):
        GeneratorOptions(schedule=schedule)


@pytest.mark.parametrize(("count", "tokens"), [(0, 50), (1, 2), (20, 1)])
def test_too_little_to_measure_is_refused(count: int, tokens: int) -> None:
    options = TuningOptions(block_sizes=BLOCKS, batches=(1,))
    with pytest.raises(DflashError) as caught:
        measure(FakeExecutor(), requests(count, tokens), options, SilentProgress())
    assert caught.value.exit_code == 2


def derive(measured: Measurements, **options: Any) -> list[int]:
    schedule = derive_schedule(measured, LIMITS, executor="cpu", **options)
    assert schedule.max_batch == 8
    return [schedule.block_size(batch) for batch in range(1, 9)]


def with_times(batches: dict[int, tuple[float, list[float]]], rate: float) -> Measurements:
    """Step seconds by batch: without drafts, and by block."""
    fields = invent_measurements(BLOCKS, rate=rate).model_dump()
    fields["steps"] = [
        {"batch": batch, "target_only": plain, "target": plain, "blocks": blocks}
        for batch, (plain, blocks) in batches.items()
    ]
    return Measurements.model_validate(fields)


def test_the_block_shrinks_to_none_as_the_machine_fills_up() -> None:
    """A memory-bound machine: rows are free at batch 1, and cost their share at batch 8."""
    times = {1: (1.0, [1.1, 1.1, 1.2]), 4: (1.2, [1.5, 2.2, 5.0]), 8: (1.3, [2.6, 5.0, 10.0])}
    blocks = derive(with_times(times, 0.8))
    assert blocks[0] == 8 and blocks[-1] == 1
    assert blocks == sorted(blocks, reverse=True)


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


def test_what_drafts_are_expected_to_bring() -> None:
    """Tokens of a step ÷ its plain steps; nothing where one of them was not measured."""
    assert tuned_ratio(SCHEDULE) == pytest.approx(4.5 / 1.7)
    late = invent_measurements([4, 8], batches=(8,))
    for sizes, measured in (([8], None), ([6], MEASURED), ([1], MEASURED), ([8], late)):
        given = {"blocks": merge_ranges(sizes), "measured": measured}
        assert tuned_ratio(SCHEDULE.model_copy(update=given)) is None
    assert tuned_ratio(None) is None


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
        ((1, 2) * 60, 1.6, False),  # which may be chance
    ],
)
def test_what_is_said(emitted: tuple[int, ...], break_even: float | None, is_said: bool) -> None:
    line = low_acceptance(DraftedSteps(steps_of(*emitted)), break_even, "my-bundle")
    assert (line is not None) == is_said
    if line is not None:
        mean = sum(emitted) / len(emitted)
        assert line == (
            f"acceptance length {mean:.2f} stays below break-even {break_even:.2f}: "
            "`--drafter none` is faster, `dflash-trt diagnose my-bundle --prompts FILE` says why"
        )


EIGHT = [5, 1, 4, 2, 8, 5, 7, 1]


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([], False),
        (list(range(1000)), False),
        ([1] * (LOOP_TIMES * LOOP_TOKENS - 1), False),  # overlaps do not count
        ([1] * (LOOP_TIMES * LOOP_TOKENS), True),
        ([1, 2] * 11 + [1], False),
        ([1, 2] * 12, True),
        ([*EIGHT, 11, *EIGHT, 12, 13], False),
        ([*EIGHT, 11, *EIGHT, 12, 13, *EIGHT], True),
        ([*EIGHT, 11, *EIGHT, 12, 13, *EIGHT[:7]], False),
        ([*EIGHT[:7], 10, *EIGHT[:7], 11, *EIGHT[:7], 12], False),
    ],
)
def test_the_same_run_of_tokens_three_times_apart(token_ids: list[int], expected: bool) -> None:
    assert is_looping(token_ids) is expected
    assert is_looping([99, *token_ids, 98]) is expected
    assert loop_end([*token_ids, 97]) == (len(token_ids) if expected else None)

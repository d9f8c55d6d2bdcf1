"""Measuring on an executor with a model known by heart, and schedules from invented times."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt.decoding import Generator, GeneratorOptions, Request
from dflash_trt.decoding.drafter_kinds import PROMPT_LOOKUP
from dflash_trt.decoding.schedule import Measurements, StepPrediction
from dflash_trt.decoding.tuning import block_times as blocks
from dflash_trt.decoding.tuning.block_times import (
    TuningOptions,
    candidate_batches,
    candidate_blocks,
    derive_schedule,
    measure,
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


def test_candidates() -> None:
    assert candidate_blocks(2) == [2] and candidate_blocks(5) == [2, 3, 4, 5]
    assert candidate_blocks(16) == [2, 3, 4, 5, 6, 7, 8, 12, 16]
    assert candidate_batches(1) == [1] and candidate_batches(12) == [1, 2, 4, 8, 12]

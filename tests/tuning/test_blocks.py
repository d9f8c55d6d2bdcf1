"""Measuring on an executor with a model known by heart, and schedules from invented times."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt.errors import DflashError
from dflash_trt.runtime import Request
from dflash_trt.speculation.schedule import Measurements
from dflash_trt.tuning import blocks
from dflash_trt.tuning.blocks import (
    TuningOptions,
    candidate_batches,
    candidate_blocks,
    derive_schedule,
    measure,
)
from tests.pairs import SilentProgress
from tests.runtime.schedules import invent_measurements
from tests.standins.executor import FakeExecutor

BLOCKS = (2, 4, 8)


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


def test_the_end_of_the_context_is_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake refuses rows past it."""
    monkeypatch.setattr(blocks, "STEPS_SECONDS", 0.0)
    executor = FakeExecutor(max_batch=2, max_seq_len=40)
    long = [Request(prompt_ids=(1,) * 30, max_tokens=10) for _ in range(20)]
    options = TuningOptions(block_sizes=BLOCKS, batches=(2,), rounds=1, prefill_chunk=7)
    assert measure(executor, long, options, SilentProgress()).positions == 32


@pytest.mark.parametrize(("count", "tokens"), [(0, 50), (1, 2), (20, 1)])
def test_too_little_to_measure_is_refused(count: int, tokens: int) -> None:
    options = TuningOptions(block_sizes=BLOCKS, batches=(1,))
    with pytest.raises(DflashError) as caught:
        measure(FakeExecutor(), requests(count, tokens), options, SilentProgress())
    assert caught.value.exit_code == 2


def derive(measured: Measurements, **options: Any) -> list[int]:
    schedule = derive_schedule(measured, 8, executor="cpu", **options)
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


def test_drafts_that_are_never_right_end_speculation() -> None:
    assert derive(invent_measurements(BLOCKS, rate=0.0)) == [1] * 8
    assert derive(invent_measurements(BLOCKS, rate=1.0, per_row=0.1)) == [8] * 8


def test_neighbours_keep_a_block_unless_another_is_clearly_better() -> None:
    times = {1: (9.0, [9.0, 1.0, 1.01]), 8: (9.0, [9.0, 1.0, 0.99])}
    assert set(derive(with_times(times, 0.0))) == {4}


def test_the_fallback_keeps_the_drafter_fed_where_that_is_cheap() -> None:
    for feeding, fallback in ((1.02, "target"), (1.2, "target_only")):
        measured = invent_measurements(BLOCKS, feeding=feeding)
        assert derive_schedule(measured, 8, executor="cpu").fallback == fallback
        asked = derive_schedule(measured, 8, executor="cpu", fallback="target")
        assert asked.fallback == "target"


def test_candidates() -> None:
    assert candidate_blocks(2) == [2] and candidate_blocks(5) == [2, 3, 4, 5]
    assert candidate_blocks(16) == [2, 3, 4, 5, 6, 7, 8, 12, 16]
    assert candidate_batches(1) == [1] and candidate_batches(12) == [1, 2, 4, 8, 12]

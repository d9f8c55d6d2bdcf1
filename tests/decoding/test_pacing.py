"""How the block follows the batch and live acceptance."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt.decoding import Generator, GeneratorOptions, Request, pacers
from dflash_trt.decoding.pacers import WINDOW_STEPS, Pacer
from dflash_trt.decoding.schedule import BlockSchedule, Measurements, StepPrediction, merge_ranges
from dflash_trt.errors import DflashError
from tests.decoding.reference import decode_plainly
from tests.decoding.schedules import invent_measurements
from tests.inspection import factors
from tests.standins.executor import FakeExecutor

BLOCKS = (2, 4, 8)


def make_schedule(blocks: list[int], measured: Measurements | None = None) -> BlockSchedule:
    known = measured or invent_measurements(BLOCKS)
    return BlockSchedule(blocks=merge_ranges(blocks), executor="fake", measured=known)


def start(executor: FakeExecutor, schedule: BlockSchedule, **options: int) -> Generator:
    return Generator(executor, options=GeneratorOptions(schedule=schedule, **options))


def requests(count: int, **fields: int) -> list[Request]:
    return [Request(prompt_ids=(index, 1, 2, 3), **fields) for index in range(count)]  # type: ignore[arg-type]


@pytest.fixture
def _never_looks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacers, "WINDOW_STEPS", 1 << 30)


@pytest.mark.usefixtures("_never_looks_back")
def test_the_block_follows_the_number_of_sequences() -> None:
    executor = FakeExecutor(max_batch=4, draft_skill=0.0)
    generator = start(executor, make_schedule([8, 4, 2, 1]))
    results = generator.generate(requests(4, max_tokens=30))
    decodes = [call for call in executor.calls if call.kind in ("speculate", "target")]
    pairs = {
        (call.sequences, call.rows) for call in decodes if call.rows != 4 or call.sequences > 1
    }
    assert pairs >= {(1, 8), (2, 4), (3, 2), (4, 1)}
    assert {call.kind for call in decodes if call.sequences == 4} == {"target"}
    for request, result in zip(requests(4, max_tokens=30), results, strict=True):
        assert result.token_ids == decode_plainly(request, executor)[0]
        assert sum(result.statistics.acceptance_histogram) == result.statistics.steps


@pytest.mark.parametrize(
    ("options", "blocks", "plain"),
    [
        ({}, [8, 8, 8], "target"),
        ({"block_size": 3}, [3, 3, 3], "target"),
        ({"speculation": False}, [1, 1, 1], "target_only"),
        ({"schedule": make_schedule([8, 4, 1])}, [8, 4, 1], "target"),
    ],
)
def test_a_warm_up_knows_the_steps_to_come(
    options: dict[str, Any], blocks: list[int], plain: str
) -> None:
    executor = FakeExecutor(max_batch=3)
    Generator(executor, options=GeneratorOptions(**options)).warm_up()
    assert executor.warmed == [(dict(enumerate(blocks, 1)), plain)]


def observe(pacer: Pacer, batch: int, rows: int, accepted: int, windows: int = 80) -> None:
    states: list[Any] = [None] * batch
    for _ in range(windows * WINDOW_STEPS):
        pacer.begin_step(states)
        for _ in range(batch):
            pacer.count(rows, min(accepted + 1, rows - 1), accepted)


def test_poor_drafts_shorten_blocks_then_end_speculation_and_are_tried_again() -> None:
    executor = FakeExecutor(max_batch=8)
    pacer = Pacer(make_schedule([8] * 8), executor.limits)
    assert pacer.block_size(4) == 8
    observe(pacer, 4, 8, 2)
    assert pacer.block_size(4) in (2, 4)
    observe(pacer, 4, 4, 0)
    assert pacer.block_size(4) == 1
    observe(pacer, 0, 1, 0, windows=160)
    assert pacer.block_size(4) > 1, "without new counts the old ones fade"


def test_drafts_that_do_as_measured_never_move_a_block() -> None:
    """Half of the drafts are accepted, as measured, with as many counts as any window holds."""
    pacer = Pacer(
        make_schedule([8] * 4, invent_measurements(BLOCKS, rate=0.5)), FakeExecutor().limits
    )
    states: list[Any] = [None] * 4
    for step in range(40 * WINDOW_STEPS):
        pacer.begin_step(states)
        for index in range(4):
            # Runs of 0, 1, 2 … accepted drafts, as often as the rate says.
            accepted = ((step * 4 + index + 1) & -(step * 4 + index + 1)).bit_length() - 1
            accepted = min(accepted, 7)
            pacer.count(8, min(accepted + 1, 7), accepted)
    assert factors(pacer) == pytest.approx([1.0] * 7, abs=0.1)


def test_prediction() -> None:
    prediction = StepPrediction(invent_measurements(BLOCKS, rate=0.5), "target_only", 4)
    assert prediction.choices == (1, 2, 4)
    assert prediction.tokens(1) == 1 and prediction.tokens(4) == 1 + 0.5 + 0.25 + 0.125
    assert prediction.tokens(4, [2.0, 2.0, 1.0]) == 1 + 1 + 1 + 0.5
    assert prediction.seconds(3, 1) == pytest.approx(3) and prediction.seconds(16, 1) == 16
    assert prediction.tokens_per_second(8, 2) == pytest.approx(1.5 / 1.1)
    assert prediction.choose(8, 4, 0.0) == 2 and prediction.choose(8, 1, 0.5) == 1
    feeding = StepPrediction(invent_measurements(BLOCKS), "target", 8)
    assert feeding.seconds(8, 1) == pytest.approx(9.6)


def test_a_schedule_that_cannot_run_is_refused() -> None:
    executor = FakeExecutor(block_size=4)
    with pytest.raises(DflashError, match="block 8 exceeds the drafter's 4"):
        start(executor, make_schedule([8]))
    for fields in ({"block_size": 4}, {"speculation": False}):
        with pytest.raises(DflashError, match="schedule"):
            GeneratorOptions(schedule=make_schedule([4]), **fields)  # type: ignore[arg-type]

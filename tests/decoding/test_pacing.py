"""How the block follows the batch, live acceptance, and gaps in the drafter's context."""

from __future__ import annotations

from types import SimpleNamespace
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


def make_schedule(
    blocks: list[int], measured: Measurements | None = None, *, feeds: bool = False
) -> BlockSchedule:
    known = measured or invent_measurements(BLOCKS)
    fallback = "target" if feeds else "target_only"
    return BlockSchedule(
        blocks=merge_ranges(blocks), executor="fake", fallback=fallback, measured=known
    )


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
    generator = start(executor, make_schedule([8, 4, 2, 1], feeds=True))
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
        ({"schedule": make_schedule([8, 4, 1])}, [8, 4, 1], "target_only"),
        ({"schedule": make_schedule([2, 1, 1], feeds=True)}, [2, 1, 1], "target"),
    ],
)
def test_a_warm_up_knows_the_steps_to_come(
    options: dict[str, Any], blocks: list[int], plain: str
) -> None:
    executor = FakeExecutor(max_batch=3)
    Generator(executor, options=GeneratorOptions(**options)).warm_up()
    assert executor.warmed == [(dict(enumerate(blocks, 1)), plain)]


def _run_down(executor: FakeExecutor, measured: Measurements, tokens: int) -> list[str]:
    """Four sequences decode plainly, then one is left: the kinds of the calls from then on."""
    generator = start(executor, make_schedule([8, 1, 1, 1], measured))
    ids = [generator.submit(one) for one in requests(4, max_tokens=tokens, ignore_eos=True)]
    while generator.used_slots < 4 or len(executor.calls) < 20:
        generator.step()
    for request_id in ids[1:]:
        generator.cancel(request_id)
    before = len(executor.calls)
    results = [event.result for _ in range(tokens) for event in generator.step()]
    last = next(result for result in results if result and result.request_id == ids[0])
    assert last.token_ids == decode_plainly(requests(1, max_tokens=tokens)[0], executor)[0]
    return [call.kind for call in executor.calls[before:]]


@pytest.mark.usefixtures("_never_looks_back")
def test_a_gap_is_filled_once_it_pays() -> None:
    executor = FakeExecutor(max_batch=4, max_seq_len=256)
    kinds = _run_down(executor, invent_measurements(BLOCKS), 200)
    filled = kinds.index("target")
    # 20 … 26 rows at 0.2 s; drafts save 0.30 s a token.
    assert 12 <= filled < 20, "first the drafts forgone must have paid for it"
    assert set(kinds[:filled]) == {"target_only"}
    assert set(kinds[filled + 1 :]) == {"speculate"}, "and then it drafts to the end"


def test_a_gap_is_filled_in_chunks_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one says that nothing of the sequence lies behind it."""
    executor = FakeExecutor(max_batch=2, max_seq_len=256)
    given, forward = [], executor.forward
    monkeypatch.setattr(executor, "forward", lambda call: given.append(call) or forward(call))
    generator = start(executor, make_schedule([8, 1]), prefill_chunk=5)
    first = generator.submit(Request(prompt_ids=tuple([3] * 21), max_tokens=150))
    other = generator.submit(Request(prompt_ids=(1, 2), max_tokens=150))
    for _ in range(20):
        generator.step()
    generator.cancel(other)
    while generator.has_work:
        for event in generator.step():
            if event.result and event.request_id == first:
                want = Request(prompt_ids=tuple([3] * 21), max_tokens=150)
                assert event.result.token_ids == decode_plainly(want, executor)[0]
    chunks = [call.rows for call in executor.calls if call.kind == "target"]
    assert max(chunks) == 5 and len(chunks) > 4
    fills = [call for call in given if call.graph == "target"]
    assert [call.is_last for call in fills] == [False] * (len(fills) - 1) + [True]
    assert all(call.is_chunk for call in fills)


def observe(pacer: Pacer, batch: int, rows: int, accepted: int, windows: int = 80) -> None:
    states: list[Any] = [SimpleNamespace(injected_until=None)] * batch
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
    states: list[Any] = [SimpleNamespace(injected_until=None)] * 4
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

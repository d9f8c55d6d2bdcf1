"""How the block follows the batch and live acceptance."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from dflash_trt.decoding import Generator, GeneratorOptions, Request, pacers
from dflash_trt.decoding.pacers import FIRST_PAUSE, WINDOW_STEPS, LivePacer, Pacer
from dflash_trt.decoding.schedule import BlockSchedule, Measurements, StepPrediction, merge_ranges
from dflash_trt.errors import DflashError
from tests.decoding.reference import decode_plainly
from tests.decoding.schedules import invent_measurements
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
    pacer = Pacer(make_schedule([8] * 8, invent_measurements(BLOCKS, feeding=1.0)), executor.limits)
    assert pacer.block_size(4) == 8
    observe(pacer, 4, 8, 2)
    assert pacer.block_size(4) in (2, 4)
    observe(pacer, 4, 4, 0)
    assert pacer.block_size(4) == 1
    observe(pacer, 0, 1, 0, windows=160)
    assert pacer.block_size(4) > 1, "without new counts the old ones fade"


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
        with pytest.raises(DflashError, match="live"):
            GeneratorOptions(live=True, **fields)  # type: ignore[arg-type]


# What a plain step costs more than target_only's, for the drafter's context.
FED = 1.025
BLOCK = 8
# Tokens of a step on the demo pair's prompts, as README shows them.
DEMO = [1] * 6 + [2] * 2 + [3] * 2 + [5] * 3 + [6] + [8] * 14


class Machine:
    """Runs a pacer's steps on a clock of its own, in which target_only's step takes 1 second.

    Args:
        ratio: what a drafted step takes, by its batch.
        tokens: those of a drafted step, by the number of steps before it.
    """

    def __init__(self, ratio: Callable[[int], float], tokens: Callable[[int], float]) -> None:
        self.now = 0.0
        self.kinds: list[str] = []
        self._ratio, self._tokens = ratio, tokens
        options = GeneratorOptions(live=True)
        limits = FakeExecutor(max_batch=32, block_size=BLOCK).limits
        self.pacer = LivePacer(options, limits, lambda: self.now)

    def step(self, batch: int = 1, noise: float = 1.0) -> float:
        """One step of `batch` sequences; returns the tokens of each."""
        states: list[Any] = [None] * batch
        rows = self.pacer.begin_step(states)
        tokens = 1.0
        if rows > 1:
            tokens = self._tokens(len(self.kinds))
            for _ in states:
                self.pacer.count(rows, rows - 1, int(tokens) - 1)
        # Whatever the batch, the first step of a kind is slow.
        kind = "drafted" if rows > 1 else "plain"
        first = 1.0 if f"{kind} {batch}" in self.kinds else 3.0
        self.now += noise * first * (self._ratio(batch) if rows > 1 else FED)
        self.pacer.end_step()
        self.kinds.append(f"{kind} {batch}")
        return tokens

    def run(self, tokens: int, batch: int = 1) -> list[str]:
        """Decodes so many tokens of each sequence; the kinds of the steps."""
        before, made = len(self.kinds), 0.0
        while made < tokens:
            made += self.step(batch)
        return [kind.split()[0] for kind in self.kinds[before:]]


def useless(_: int) -> float:
    return 1.0


def spent(machine: Machine, ratio: float) -> float:
    """Its time without the first step of each kind, which is slow, drafts or not."""
    kinds = {kind.split()[0] for kind in machine.kinds}
    return machine.now - 2 * ratio * ("drafted" in kinds) - 2 * FED * ("plain" in kinds)


@pytest.mark.parametrize("ratio", [1.2, 1.5, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_useless_draft_costs_at_most_a_tenth_of_200_tokens(ratio: float, batch: int) -> None:
    machine = Machine(lambda _: ratio, useless)
    kinds = machine.run(200, batch)
    assert spent(machine, ratio) <= 1.10 * 200
    assert "plain" in kinds[:70] and "drafted" in kinds
    # From then on they are tried more and more seldom.
    kinds = machine.run(20_000, batch)
    assert kinds.count("drafted") * (ratio - 1) < 0.01 * 20_000


@pytest.mark.parametrize(("ratio", "kept"), [(1.57, 0.96), (2.0, 0.95), (3.0, 0.92)])
def test_a_good_draft_is_kept(ratio: float, kept: float) -> None:
    """Of always drafting, over 4000 tokens of the demo's acceptance, in which bad luck comes."""
    chance = random.Random(3)
    machine = Machine(lambda _: ratio, lambda _: chance.choice(DEMO))
    tokens = sum(machine.step() for _ in range(900))
    assert tokens * ratio * len(DEMO) / sum(DEMO) / spent(machine, ratio) >= kept


def test_drafts_come_back_when_they_are_of_use_again() -> None:
    machine = Machine(lambda _: 2.0, lambda step: 1.0 if step < 300 else 6.0)
    machine.run(300)
    kinds = machine.run(FIRST_PAUSE * 4)
    back = kinds.index("drafted")
    assert back < 2 * FIRST_PAUSE + 8
    assert set(kinds[back : back + 60]) == {"drafted"}


def test_poor_drafts_are_left_out_where_many_decode_and_kept_where_few_do() -> None:
    machine = Machine(lambda batch: 1.2 if batch < 4 else 3.5, lambda step: 1 + step % 3)
    machine.run(100, batch=1)
    machine.run(100, batch=8)
    assert machine.run(50, batch=8).count("drafted") == 0
    assert set(machine.run(50, batch=1)) == {"drafted"}
    assert machine.run(20, batch=16).count("drafted") == 0, "it costs no less where more decode"


def test_a_machine_that_stutters_does_not_end_good_drafts() -> None:
    rng = random.Random(7)
    machine = Machine(lambda _: 1.57, lambda _: rng.choice(DEMO))
    tokens = 0.0
    for _ in range(4000):
        tokens += machine.step(noise=10.0 if rng.random() < 0.1 else rng.uniform(0.8, 1.3))
    assert tokens / 4000 > 0.97 * sum(DEMO) / len(DEMO)


class TimedExecutor(FakeExecutor):
    """A fake one that takes time: 1 for a plain step, 2 for a drafted one."""

    now = 0.0

    def _begin(self, kind: str, call: Any) -> None:
        super()._begin(kind, call)
        self.now += 2.0 if kind == "speculate" else 1.0


@pytest.mark.parametrize(("skill", "most"), [(0.0, 40), (1.0, 300)])
def test_a_generator_follows_it_and_says_the_same(skill: float, most: int) -> None:
    """Requests that draft and some that do not, one after the other and together."""
    executor = TimedExecutor(max_batch=4, max_seq_len=256, draft_skill=skill)
    options = GeneratorOptions(live=True, prefill_chunk=7)
    generator = Generator(executor, options=options, clock=lambda: executor.now)
    requests = [
        Request(prompt_ids=(index, 1, 2, 3), max_tokens=200, speculate=index != 3)
        for index in range(6)
    ]
    for result, request in zip(generator.generate(requests), requests, strict=True):
        assert result.token_ids == decode_plainly(request, executor)[0]
    kinds = [call.kind for call in executor.calls]
    assert "target_only" not in kinds, "the drafter's context has no gaps"
    assert 0 < kinds.count("speculate") < most
    if skill:  # what may draft does, but for the checks
        assert all(one.statistics.steps < 60 for one in generator.generate(requests[:3]))

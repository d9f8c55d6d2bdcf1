"""Drafts are left out while they do not pay, without a schedule: what that loses and keeps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from dflash_trt.decoding import Generator, GeneratorOptions, Request
from dflash_trt.decoding.pacers import FIRST_PAUSE, PROBE_STEPS, LivePacer
from dflash_trt.errors import DflashError
from tests.decoding.reference import decode_plainly
from tests.standins.executor import FakeExecutor

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
        timed: whether the ratios were found when the pair was opened.
    """

    def __init__(
        self, ratio: Callable[[int], float], tokens: Callable[[int], float], *, timed: bool = False
    ) -> None:
        self.now = 0.0
        self.kinds: list[str] = []
        self._ratio, self._tokens = ratio, tokens
        ratios = tuple((batch, ratio(batch)) for batch in (1, 2, 4, 8, 16, 32) if timed)
        options = GeneratorOptions(live=True, step_ratios=ratios)
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


def draw_from(chance: random.Random) -> Callable[[int], float]:
    """Tokens of steps as the demo pair's come."""
    return lambda _: chance.choice(DEMO)


def spent(machine: Machine, ratio: float) -> float:
    """Its time without the first step of each kind, which is slow, drafts or not."""
    kinds = {kind.split()[0] for kind in machine.kinds}
    return machine.now - 2 * ratio * ("drafted" in kinds) - 2 * FED * ("plain" in kinds)


RATIOS = (1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 20.0)


# Untimed at more than 4, the steps that show what they cost lose more.
@pytest.mark.parametrize(
    ("ratio", "timed"), [(r, True) for r in RATIOS] + [(r, False) for r in RATIOS if r <= 4]
)
@pytest.mark.parametrize("batch", [1, 8])
def test_a_useless_draft_costs_at_most_a_tenth_of_200_tokens(
    ratio: float, batch: int, timed: bool
) -> None:
    machine = Machine(lambda _: ratio, useless, timed=timed)
    kinds = machine.run(200, batch)
    assert spent(machine, ratio) <= 1.10 * 200
    assert "plain" in kinds[:70]
    assert ("drafted" in kinds) == (ratio <= BLOCK or not timed), "no full block would pay"
    # From then on they are tried more and more seldom.
    kinds = machine.run(20_000, batch)
    assert kinds.count("drafted") * (ratio - 1) < 0.01 * 20_000


@pytest.mark.parametrize(("ratio", "kept"), [(1.57, 1.0), (2.0, 1.0), (3.0, 0.99), (4.0, 0.97)])
def test_a_good_draft_that_was_timed_is_kept(ratio: float, kept: float) -> None:
    """Of always drafting, in the first 200 tokens: the mean of runs with the demo's acceptance."""
    shares = []
    for seed in range(200):
        always, chance = random.Random(seed), random.Random(seed)
        machine = Machine(lambda _: ratio, draw_from(chance), timed=True)
        machine.run(200)
        tokens = steps = 0
        while tokens < 200:
            tokens, steps = tokens + always.choice(DEMO), steps + 1
        shares.append(steps * ratio / spent(machine, ratio))
    assert sum(shares) / len(shares) >= kept


def test_a_good_draft_is_kept_for_a_long_life() -> None:
    """Of always drafting, in 4000 tokens, in which bad luck comes more than once."""
    shares = []
    for seed in range(12):
        chance = random.Random(seed)
        machine = Machine(lambda _: 3.5, draw_from(chance), timed=True)
        tokens = sum(machine.step() for _ in range(900))
        shares.append(tokens * 3.5 * len(DEMO) / sum(DEMO) / spent(machine, 3.5))
    assert sum(shares) / len(shares) >= 0.97


def test_a_ratio_that_was_found_wrong_is_corrected() -> None:
    """A stutter at opening made drafts look hopeless."""
    rng = random.Random(9)
    machine = Machine(lambda _: 1.57, lambda _: rng.choice(DEMO))
    limits = FakeExecutor(max_batch=32, block_size=BLOCK).limits
    options = GeneratorOptions(live=True, step_ratios=((1, 30.0),))
    machine.pacer = LivePacer(options, limits, lambda: machine.now)
    assert set(machine.run(200)) == {"plain"}
    machine.run(8000)
    assert set(machine.run(100)) == {"drafted"}


def test_no_ratio_is_so_small_that_useless_drafts_go_on() -> None:
    """A stutter at opening made them look free."""
    machine = Machine(lambda _: 1.4, useless)
    limits = FakeExecutor(max_batch=32, block_size=BLOCK).limits
    options = GeneratorOptions(live=True, step_ratios=((1, 0.5),))
    machine.pacer = LivePacer(options, limits, lambda: machine.now)
    assert machine.run(200).count("drafted") <= 52
    assert spent(machine, 1.4) <= 1.13 * 200


def test_a_good_draft_drafts_at_every_step_and_is_checked_seldom() -> None:
    rng = random.Random(3)
    machine = Machine(lambda _: 1.57, lambda _: rng.choice(DEMO), timed=True)
    assert set(machine.run(200)) == {"drafted"}
    kinds = machine.run(20_000)
    assert 0 < kinds.count("plain") < 0.01 * len(kinds)


def test_a_modest_draft_is_kept_once_it_was_timed() -> None:
    """It brings less than was assumed to be needed, and more than it costs."""
    rng = random.Random(5)
    machine = Machine(lambda _: 1.3, lambda _: rng.choice([1, 2, 3, 4]))
    tokens = 200
    kinds = machine.run(tokens)
    assert kinds.count("plain") == PROBE_STEPS
    spent = machine.now - 2 * 1.3 - 2 * FED
    assert spent * 0.97 <= tokens / 2.5 * 1.3 * 1.05  # chance has its say in 200 tokens


def test_drafts_that_bring_much_and_cost_more_are_found_by_the_check_without_cause() -> None:
    machine = Machine(lambda _: 6.0, lambda step: 3 + step % 2)
    limits = FakeExecutor(max_batch=32, block_size=BLOCK).limits
    options = GeneratorOptions(live=True, step_ratios=((32, 1.5),))
    machine.pacer = LivePacer(options, limits, lambda: machine.now)
    kinds = machine.run(1000, batch=32)
    assert kinds[:128] == ["drafted"] * 128
    assert kinds[150:].count("plain") > 0.9 * len(kinds[150:])


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
    assert machine.run(50, batch=8).count("drafted") == 0


def test_useless_drafts_end_at_every_batch_at_once() -> None:
    machine = Machine(lambda batch: 1.5 + batch / 8, useless)
    machine.run(30, batch=8)
    for batch in (7, 1, 3, 8):
        assert set(machine.run(20, batch)) == {"plain"}


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


def test_a_step_that_fails_teaches_nothing() -> None:
    executor = TimedExecutor(draft_skill=1.0)
    options = GeneratorOptions(live=True, step_ratios=((1, 2.0),))
    generator = Generator(executor, options=options, clock=lambda: executor.now)
    request = Request(prompt_ids=(1, 2), max_tokens=40)
    generator.submit(request)
    generator.step()
    executor.error = DflashError("broken", where="here")
    for _ in range(50):
        with pytest.raises(DflashError):
            generator.step()
    executor.error = None
    while generator.has_work:
        generator.step()
    assert {call.kind for call in executor.calls[1:]} == {"speculate"}


def test_what_would_be_fixed_is_not_watched() -> None:
    for fields in ({"block_size": 4}, {"speculation": False}):
        with pytest.raises(DflashError, match="live"):
            GeneratorOptions(live=True, **fields)  # type: ignore[arg-type]

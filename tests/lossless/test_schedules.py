"""Rung 2: no schedule and no learning changes a bit of any logit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count

import pytest

from dflash_trt.backends.base import StepCall, TargetCall
from dflash_trt.decoding import Generator, GeneratorOptions, SamplingParams
from dflash_trt.decoding.schedule import BlockSchedule, merge_ranges
from tests.covering import exhaustive
from tests.decoding.schedules import invent_measurements
from tests.lossless.runs import (
    OUTPUT,
    count_tokens,
    make_requests,
    run_baseline,
    run_traffic,
)
from tests.pairs import TWO_KINDS, PairFactory, TinyPair

SLOTS, BLOCKS = 8, range(2, 9)


@pytest.fixture(scope="module")
def pair(make_pair: PairFactory) -> TinyPair:
    return make_pair("qwen3", {"vocab": 64}, TWO_KINDS, fit_steps=60, max_batch=SLOTS)


@dataclass
class Watched:
    """An executor that remembers the graphs of its calls."""

    inner: object
    kinds: list[str]

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def forward(self, call: TargetCall) -> object:
        self.kinds.append(call.graph)
        return self.inner.forward(call)  # type: ignore[attr-defined]

    def speculate(self, call: StepCall) -> object:
        self.kinds.append("speculate")
        return self.inner.speculate(call)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def executor(pair: TinyPair) -> Iterator[Watched]:
    opened = pair.open()
    yield Watched(opened, [])
    opened.close()


def random_schedule(rng: random.Random) -> BlockSchedule:
    """Blocks by batch at random, none at some."""
    sizes = [rng.choice([1, 1, *BLOCKS]) for _ in range(SLOTS)]
    measured = invent_measurements(
        BLOCKS,
        rate=rng.choice([0.2, 0.9]),
        plain=rng.choice([1.0, 3.0]),
    )
    return BlockSchedule(blocks=merge_ranges(sizes), executor="cpu", measured=measured)


@pytest.mark.parametrize(
    ("sampling", "seeds"),
    [
        exhaustive(SamplingParams(), 12),
        (SamplingParams(temperature=0.8, seed=5), 4),
    ],
    ids=["greedy", "drawn"],
)
def test_random_schedules_keep_every_bit(
    executor: Watched, sampling: SamplingParams, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come, go and are cancelled at random under schedules at random."""
    monkeypatch.setattr("dflash_trt.decoding.pacers.WINDOW_STEPS", 8)
    requests = make_requests(64, SLOTS, sampling)
    expected = run_baseline(executor, requests)  # type: ignore[arg-type]
    executor.kinds.clear()
    compared = 0
    for seed in range(seeds):
        rng = random.Random(seed)
        options = GeneratorOptions(
            record_logits=True, prefill_chunk=rng.choice([5, 17, 64]), schedule=random_schedule(rng)
        )
        generator = Generator(executor, options=options)  # type: ignore[arg-type]
        results = run_traffic(generator, requests, expected, rng, arrivals=0.1)
        compared += count_tokens(results)
    assert compared > 5 * seeds * OUTPUT
    assert {"speculate", "target"} <= {*executor.kinds} <= {"speculate", "target", "move"}


def test_drafts_that_come_and_go_keep_every_bit(
    executor: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a schedule, on a clock that says anything; pauses are short, so that much changes."""
    monkeypatch.setattr("dflash_trt.decoding.pacers.FIRST_PAUSE", 12)
    monkeypatch.setattr("dflash_trt.decoding.pacers.LONGEST_PAUSE", 24)
    requests = make_requests(64, SLOTS)
    expected = run_baseline(executor, requests)  # type: ignore[arg-type]
    executor.kinds.clear()
    rng = random.Random(0)
    ticks = accumulate(rng.choice([0.1, 1.0, 5.0]) for _ in count())
    options = GeneratorOptions(record_logits=True, prefill_chunk=17, live=True)
    generator = Generator(executor, options=options, clock=ticks.__next__)  # type: ignore[arg-type]
    results = run_traffic(generator, requests, expected, rng, arrivals=0.1)
    assert count_tokens(results) > 5 * OUTPUT
    trials = [one.statistics.position_trials for one in results]
    drafted = sum(one[0] for one in trials if one)  # none of what ended before a draft
    assert 0.2 < drafted / sum(one.statistics.steps for one in results) < 0.95
    assert "target_only" not in executor.kinds

"""What a drafted step costs is found when a pair is opened, within bounds, and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt.core.limits import PagePool
from dflash_trt.decoding import Generator, GeneratorOptions, Request
from dflash_trt.decoding.opening import MOST_S, time_opening
from tests.decoding.reference import decode_plainly
from tests.standins.executor import FakeExecutor, PagedFakeExecutor

LIVE = GeneratorOptions(live=True)


class Timed:
    """What an executor's passes take on a clock of its own."""

    now = 0.0
    plain_s = 0.001

    def _begin(self, kind: str, call: Any) -> None:
        super()._begin(kind, call)  # type: ignore[misc]
        self.now += self.plain_s * (2.5 if kind == "speculate" else 1.0)


class TimedExecutor(Timed, FakeExecutor): ...


class TimedPagedExecutor(Timed, PagedFakeExecutor): ...


def make(kind: str, **arguments: Any) -> TimedExecutor | TimedPagedExecutor:
    if kind == "linear":
        return TimedExecutor(max_seq_len=256, **arguments)
    return TimedPagedExecutor(PagePool(pages=200, page_size=8), max_seq_len=256, **arguments)


@pytest.mark.parametrize("kind", ["linear", "paged"])
def test_ratios_by_batch_and_no_trace(kind: str) -> None:
    executor = make(kind, max_batch=6)
    found = time_opening(executor, LIVE, lambda: executor.now)
    assert [batch for batch, _ in found] == [1, 2, 4]
    assert [ratio for _, ratio in found] == pytest.approx([2.5, 2.5, 2.5])
    options = GeneratorOptions(live=True, step_ratios=found)
    generator = Generator(executor, options=options, clock=lambda: executor.now)
    requests = [Request(prompt_ids=(0, index), max_tokens=60) for index in range(8)]
    for result, request in zip(generator.generate(requests), requests, strict=True):
        assert result.token_ids == decode_plainly(request, executor)[0]


@pytest.mark.parametrize("plain_s", [0.02, 0.05, 0.08, 0.2])
def test_within_its_time(plain_s: float) -> None:
    executor = make("linear", max_batch=8)
    executor.plain_s = plain_s
    found = time_opening(executor, LIVE, lambda: executor.now)
    assert executor.now <= MOST_S
    assert bool(found) == (plain_s <= MOST_S / 24)


def test_none_where_the_context_is_too_short_or_drafts_are_looked_up() -> None:
    short = TimedExecutor(max_seq_len=12, max_batch=1)
    assert time_opening(short, LIVE, lambda: short.now) == ()
    looked_up = GeneratorOptions(live=True, drafter="prompt-lookup")
    assert time_opening(short, looked_up, lambda: short.now) == ()

"""A generator that a program's threads share: failures reach those they concern, and pass."""

from __future__ import annotations

import asyncio

import pytest

from dflash_trt.decoding import Generator, Request
from dflash_trt.decoding.host import GeneratorHost
from dflash_trt.decoding.jobs import JobRunner
from dflash_trt.errors import DflashError
from tests.decoding.reference import decode_plainly
from tests.standins.executor import FakeExecutor

REQUEST = Request(prompt_ids=(1, 2, 3), max_tokens=12)


class Opened:
    """A host over executors of the test's."""

    def __init__(self) -> None:
        self.executors: list[FakeExecutor] = []
        self.host = GeneratorHost(self._open)

    def _open(self) -> JobRunner:
        self.executors.append(FakeExecutor())
        return JobRunner(Generator(self.executors[-1]), self.executors[-1])

    def run(self) -> tuple[int, ...]:
        return tuple(one for _, event in self.host.events([REQUEST]) for one in event.token_ids)

    async def stream(self) -> tuple[int, ...]:
        return tuple([one async for event in self.host.stream(REQUEST) for one in event.token_ids])


EXPECTED = decode_plainly(REQUEST, FakeExecutor())[0]


def test_an_error_of_the_executor_comes_as_it_is_and_may_pass() -> None:
    opened = Opened()
    other = opened.host.events([REQUEST])
    tokens = next(other)[1].token_ids
    opened.executors[0].error = MemoryError("no room")
    with pytest.raises(MemoryError):
        opened.run()
    opened.executors[0].error = None
    # The one that failed is cancelled; the one beside it goes on where it was.
    assert tokens + tuple(one for _, event in other for one in event.token_ids) == EXPECTED
    assert opened.host.open().live == 0
    assert opened.run() == EXPECTED
    opened.host.close()
    assert opened.executors[0].closed and len(opened.executors) == 1


def test_a_thread_of_its_own_replaces_an_executor_that_failed() -> None:
    opened = Opened()
    assert asyncio.run(opened.stream()) == EXPECTED
    opened.executors[0].error = RuntimeError("device lost")
    for ask in (opened.run, lambda: asyncio.run(opened.stream())):
        with pytest.raises(DflashError, match="device lost"):
            ask()
        opened.executors[-1].error = None
        assert opened.run() == EXPECTED
        opened.executors[-1].error = RuntimeError("device lost")
    assert [one.closed for one in opened.executors] == [True, True, False]
    opened.host.close()
    assert opened.executors[-1].closed
    for ask in (opened.run, lambda: asyncio.run(opened.stream())):
        with pytest.raises(DflashError, match="shutting down"):
            ask()


def test_a_failure_right_after_the_thread_took_over_opens_another() -> None:
    opened = Opened()
    waiting = opened.host.events([REQUEST])
    next(waiting)
    opened.executors[0].error = RuntimeError("device lost")
    with pytest.raises(DflashError, match="device lost"):
        asyncio.run(opened.stream()) and next(waiting)
    opened.executors[-1].error = None
    assert opened.run() == EXPECTED
    assert opened.executors[0].closed and len(opened.executors) == 2
    opened.host.close()

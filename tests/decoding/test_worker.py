"""The generator's thread: what goes in comes out once, whatever happens in between."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from dflash_trt.decoding import Generator, Request, TokenEvent
from dflash_trt.decoding.host import GeneratorHost
from dflash_trt.decoding.jobs import Failure, Job, JobRunner, Outcome
from dflash_trt.decoding.worker import GeneratorWorker, Phase
from dflash_trt.errors import DflashError
from tests.decoding.reference import decode_plainly
from tests.inspection import has_failed, is_closing
from tests.standins.executor import FakeExecutor
from tests.waiting import PATIENCE_S, wait_until


class SteppedExecutor(FakeExecutor):
    """Runs a step only when the test lets it, once `stepped` is set."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.stepped = False
        self.permits = threading.Semaphore(0)
        self.poisoned: int | None = None

    def _run(self, call, token_ids, injects):  # type: ignore[no-untyped-def]
        if self.stepped:
            self.permits.acquire()
        logits = super()._run(call, token_ids, injects)
        for index, slot in enumerate(range(call.first_slot, call.first_slot + call.batch)):
            if self.poisoned is not None and self._cached[slot, 0] == self.poisoned:
                logits[index] = np.nan
        return logits


class Listener:
    """Keeps what a job hears."""

    def __init__(self) -> None:
        self.heard: list[TokenEvent | Failure] = []
        self.last: queue.Queue[TokenEvent | Failure] = queue.Queue()

    def __call__(self, event: TokenEvent | Failure) -> None:
        self.heard.append(event)
        if isinstance(event, Failure) or event.result is not None:
            self.last.put(event)

    def failure(self) -> Failure:
        last = self.last.get(timeout=PATIENCE_S)
        assert isinstance(last, Failure)
        return last

    def tokens(self) -> tuple[tuple[int, ...], str | None]:
        last = self.last.get(timeout=PATIENCE_S)
        assert isinstance(last, TokenEvent) and last.result is not None
        joined = tuple(
            one for event in self.heard if isinstance(event, TokenEvent) for one in event.token_ids
        )
        assert joined == last.result.token_ids
        return joined, last.finish_reason


class Setup:
    """A worker over executors of the test's."""

    def __init__(self, capacity: int = 16, stepped: bool = False, **options: int) -> None:
        self.executors: list[SteppedExecutor] = []
        self.fail_to_open = False
        self.options = options
        self.phases: list[Phase] = []
        self.worker = GeneratorWorker(self._open, capacity, on_phase=self.phases.append)
        self.worker.start()
        self.executor.stepped = stepped

    def _open(self) -> JobRunner:
        if self.fail_to_open:
            raise DflashError("no memory")
        self.executors.append(SteppedExecutor(**self.options))
        return JobRunner(Generator(self.executors[-1]), self.executors[-1])

    @property
    def executor(self) -> SteppedExecutor:
        return self.executors[-1]

    def submit(
        self, *prompt: int, flow: str | None = None, **fields: float | None
    ) -> tuple[Job, Listener]:
        listener = Listener()
        deadline = fields.pop("deadline", None)
        request = Request(prompt_ids=prompt, **{"max_tokens": 20, **fields})  # type: ignore[arg-type]
        job = Job(request=request, listener=listener, deadline=deadline, flow=flow)
        self.worker.submit(job)
        return job, listener


@pytest.fixture
def make() -> Iterator[Callable[..., Setup]]:
    made: list[Setup] = []

    def call(**options: int) -> Setup:
        made.append(Setup(**options))
        return made[-1]

    yield call
    for one in made:
        for executor in one.executors:
            executor.stepped = False
            executor.permits.release(1000)
        one.worker.close()


def test_results_are_the_engines(make: Callable[..., Setup]) -> None:
    setup = make(max_batch=4)
    jobs = [setup.submit(*range(1, 2 + number % 7)) for number in range(12)]
    for job, listener in jobs:
        expected, reason, _ = decode_plainly(job.request, FakeExecutor())
        assert listener.tokens() == (expected, reason)
    wait_until(lambda: setup.worker.load.active == 0)
    assert setup.worker.load.cached_tokens == 0
    assert len(setup.executor.warmed) == 1, "before the first job, and once"


def test_cancelling_frees_the_slot_within_a_step(make: Callable[..., Setup]) -> None:
    setup = make(max_batch=1, stepped=True)
    job, listener = setup.submit(1, 2, max_tokens=50)
    _, waiting = setup.submit(3, 4, max_tokens=1)
    setup.executor.permits.release()  # the prompt
    wait_until(lambda: len(listener.heard) == 1)
    job.cancelled = True
    # One step that had begun may still end; the next chunk belongs to the one that waited.
    setup.executor.permits.release(2)
    assert listener.tokens()[1] == "cancelled"
    assert len(waiting.tokens()[0]) == 1


def test_a_deadline_ends_a_request_that_runs_and_one_that_waits(
    make: Callable[..., Setup],
) -> None:
    setup = make(max_batch=1, stepped=True)
    soon = time.perf_counter() + 0.05
    _, running = setup.submit(1, deadline=soon)
    _, waiting = setup.submit(2, deadline=soon)
    time.sleep(0.06)
    setup.executor.permits.release(5)
    for listener in (running, waiting):
        assert listener.failure().outcome is Outcome.TIMED_OUT


def test_a_full_queue_refuses_at_once(make: Callable[..., Setup]) -> None:
    setup = make(max_batch=1, capacity=2, stepped=True)
    accepted = [setup.submit(1), setup.submit(2)]
    _, refused = setup.submit(3)
    assert refused.failure().outcome is Outcome.OVERFLOW  # though no step has ended
    for job, _ in accepted:
        job.cancelled = True
    setup.executor.stepped = False
    setup.executor.permits.release(9)
    for _, listener in accepted:
        listener.tokens()
    assert setup.submit(3)[1].tokens()


def test_many_of_one_flow_leave_room_for_others(make: Callable[..., Setup]) -> None:
    setup = make(max_batch=1, capacity=4, stepped=True)
    for _ in range(4):
        setup.submit(1, flow="many")
    assert setup.submit(1, flow="many")[1].failure().outcome is Outcome.OVERFLOW
    for flow in ("a", "a", "b"):
        setup.submit(2, flow=flow)
    for flow in ("a", "b", "many"):  # a third of the places is one
        assert setup.submit(2, flow=flow)[1].failure().outcome is Outcome.OVERFLOW


def test_a_token_that_panics_ends_its_request_alone() -> None:
    """A decoder that reads beyond a text of nothing but what it strips: a panic in Rust."""
    requests = [Request(prompt_ids=(first, 5, 6), max_tokens=20) for first in (1, 9, 2)]
    expected = [decode_plainly(one, FakeExecutor(vocab_size=200)) for one in requests]
    (bad, *_) = set(expected[1][0]).difference(expected[0][0], expected[2][0])
    letters = {chr(0x4E00 + index): index for index in range(200)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="\u4e00"))
    tokenizer.decoder = decoders.Strip(chr(0x4E00 + bad), 0, 1 << 40)
    executor = FakeExecutor(vocab_size=200)
    runner = JobRunner(Generator(executor, tokenizer=tokenizer), executor)
    listeners = [Listener() for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        runner.add(Job(request=request, listener=listener))
    while runner.live:
        runner.turn()
    failure = listeners[1].failure()
    assert (failure.outcome, failure.error.where) == (Outcome.FAILED, "tokenizer")
    for index in (0, 2):
        assert listeners[index].tokens() == expected[index][:2]


def test_a_failed_executor_is_replaced(make: Callable[..., Setup]) -> None:
    setup = make(max_batch=2)
    broken = setup.executor
    broken.stepped = True
    jobs = [setup.submit(number) for number in (1, 2, 3)]
    broken.permits.release()
    # A job that had only arrived would be run by the next executor: the second turn has all three.
    wait_until(lambda: setup.phases.count(Phase.TURN) == 2)
    broken.error = RuntimeError("device lost")
    broken.permits.release(9)
    for _, listener in jobs:
        failure = listener.failure()
        assert failure.outcome is Outcome.FAILED and "device lost" in failure.error.message
    job, listener = setup.submit(4, 5)
    assert listener.tokens()[0] == decode_plainly(job.request, FakeExecutor())[0]
    assert broken.closed and len(setup.executors) == 2
    assert setup.phases[setup.phases.index(Phase.OPENING) - 1] is Phase.TURN
    wait_until(lambda: setup.phases[-1] is Phase.IDLE)


def test_an_executor_that_cannot_be_replaced_refuses_all_to_come(
    make: Callable[..., Setup],
) -> None:
    setup = make(max_batch=2, stepped=True)
    _, listener = setup.submit(1)
    setup.executor.error = RuntimeError("device lost")
    setup.fail_to_open = True
    setup.executor.permits.release(9)
    assert "device lost" in listener.failure().error.message
    wait_until(lambda: has_failed(setup.worker))
    later = setup.submit(2)[1].failure()
    assert "could not be opened again: no memory; restart the server" in later.error.message
    wait_until(lambda: setup.phases[-1] is Phase.BROKEN)


def test_closing_ends_every_request(make: Callable[..., Setup]) -> None:
    setup = make(max_batch=1, stepped=True)
    listeners = [setup.submit(number)[1] for number in (1, 2)]
    closing = threading.Thread(target=setup.worker.close)
    closing.start()
    wait_until(lambda: is_closing(setup.worker))
    setup.executor.permits.release(9)
    closing.join(PATIENCE_S)
    for listener in listeners:
        assert "shutting down" in listener.failure().error.message
    assert setup.executor.closed
    assert setup.submit(3)[1].failure().outcome is Outcome.FAILED


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

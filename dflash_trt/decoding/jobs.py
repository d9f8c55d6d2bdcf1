"""Jobs: what clients want of a generator, how it ends, and what runs them step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum

from dflash_trt.backends.base import Executor
from dflash_trt.decoding.generator import Generator
from dflash_trt.decoding.request import Request, RequestFailedError, TokenEvent
from dflash_trt.decoding.statistics import RunningTotals
from dflash_trt.errors import DflashError


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    OVERFLOW = "overflow"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a request that got no result."""

    outcome: Outcome
    error: DflashError


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One request on its way through the generator.

    Args:
        request: what to run.
        listener: hears every event, on the worker's thread, and must not block it. The last thing
            it hears is an event with a result, or a Failure; after that nothing.
        deadline: moment of `time.perf_counter` after which it is ended; None is never.
        flow: what it takes turns with others as part of; itself where None is given.

    `cancelled` may be set by any thread; the generator's next step frees the slot.
    """

    request: Request
    listener: Callable[[TokenEvent | Failure], None]
    deadline: float | None = None
    flow: Hashable = None
    arrived_at: float = field(default_factory=time.perf_counter)
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.flow = id(self) if self.flow is None else self.flow

    @property
    def overdue(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline


TOO_LATE = "the deadline has passed"
_OVERDUE = Failure(Outcome.TIMED_OUT, DflashError(TOO_LATE, where="timeout"))


@dataclass(frozen=True, slots=True)
class Load:
    """What a generator holds between two steps; `waiting` counts jobs that have no slot yet."""

    active: int = 0
    waiting: int = 0
    cached_tokens: int = 0
    cache_usage: float = 0.0


class JobRunner:
    """Runs jobs on a generator and executor of its own; for one thread at a time."""

    def __init__(self, generator: Generator, executor: Executor) -> None:
        self.generator = generator
        self.executor = executor
        self._live: dict[int, Job] = {}
        self._failures: dict[int, Failure] = {}

    @property
    def live(self) -> int:
        """Jobs whose listener has not been told of their end."""
        return len(self._live)

    @property
    def flows(self) -> list[Hashable]:
        """The flow of each live job; any thread may ask."""
        return [job.flow for job in tuple(self._live.values())]

    @property
    def load(self) -> Load:
        """What the generator holds now."""
        used = self.generator.used_slots
        return Load(
            active=used,
            waiting=max(len(self._live) - used, 0),
            cached_tokens=self.generator.cached_tokens,
            cache_usage=self.generator.cache_usage,
        )

    def add(self, job: Job) -> None:
        """Submits a job; its listener hears all that follows, a refusal too."""
        try:
            self._live[self.generator.submit(job.request, job.arrived_at, job.flow)] = job
        except DflashError as error:
            job.listener(Failure(Outcome.REFUSED, error))

    def drop_ended(self) -> None:
        """Frees the slots of jobs that were cancelled or are overdue; they hear it next turn."""
        for request_id, job in self._live.items():
            if request_id in self._failures:
                continue
            if job.overdue:
                self._drop(request_id, _OVERDUE)
            elif job.cancelled:
                self.generator.cancel(request_id)

    def turn(self) -> None:
        """One step of every job; a request that cannot go on fails alone.

        Raises:
            Exception: the executor's, when it failed; what was not done is left for the next turn.
        """
        self.drop_ended()
        try:
            events = self.generator.step()
        except RequestFailedError as error:
            outcome = Outcome.REFUSED if error.usage else Outcome.FAILED
            self._drop(error.request_id, Failure(outcome, error))
            return  # what the step had done for the others comes with the next one
        for event in events:
            self._deliver(event)

    def take_jobs(self) -> list[Job]:
        """Hands over the jobs that have not ended; this runner tells them nothing more."""
        jobs, self._live = list(self._live.values()), {}
        self._failures.clear()
        return jobs

    def warm_up(self) -> None:
        """Proves that the generator runs: loading done, buffers allocated, kernels chosen.

        Raises:
            Exception: it does not; the executor is closed then.
        """
        try:
            self.generator.warm_up()
            self.generator.generate([Request(prompt_ids=(0, 0), max_tokens=2, ignore_eos=True)])
            self.generator.totals = RunningTotals()  # nobody asked for these
        except BaseException:
            self.executor.close()
            raise

    def _drop(self, request_id: int, failure: Failure) -> None:
        """Frees the slot; the cancelled request's last event then delivers `failure`."""
        self._failures[request_id] = failure
        self.generator.cancel(request_id)

    def _deliver(self, event: TokenEvent) -> None:
        if event.result is None:
            self._live[event.request_id].listener(event)
            return
        job = self._live.pop(event.request_id)
        job.listener(self._failures.pop(event.request_id, event))

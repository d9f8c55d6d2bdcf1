"""Runs jobs on a generator in turns: first cancellations and deadlines, then one step."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.backends.base import Executor
from dflash_trt.errors import DflashError
from dflash_trt.runtime.events import TokenEvent
from dflash_trt.runtime.generator import Generator, RequestFailedError
from dflash_trt.runtime.jobs import Failure, Job, Outcome
from dflash_trt.runtime.request import Request

_TOO_LATE = Failure(Outcome.TIMED_OUT, DflashError("the deadline has passed", where="timeout"))


@dataclass(frozen=True, slots=True)
class Load:
    """What the generator holds between two steps; `waiting` counts jobs that have no slot yet."""

    active: int = 0
    waiting: int = 0
    cached_tokens: int = 0
    cache_usage: float = 0.0


class JobRunner:
    """Runs jobs on `generator`, which is its own, as is the executor; for one thread at a time."""

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
        """Submits a job; all that follows, a refusal too, goes to its listener."""
        try:
            self._live[self.generator.submit(job.request, job.arrived_at)] = job
        except DflashError as error:
            job.listener(Failure(Outcome.REFUSED, error))

    def drop_ended(self) -> None:
        """Frees the slots of jobs that were cancelled or are overdue; they hear it next turn."""
        for request_id, job in self._live.items():
            if request_id in self._failures:
                continue
            if job.overdue:
                self._drop(request_id, _TOO_LATE)
            elif job.cancelled:
                self.generator.cancel(request_id)

    def turn(self) -> None:
        """Brings every job a step further.

        A request that cannot go on ends with a Failure and takes no other along.

        Raises:
            Exception: the executor's, when it failed; what was not done is left for the next turn.
        """
        self.drop_ended()
        try:
            events = self.generator.step()
        except RequestFailedError as error:
            self._drop(error.request_id, Failure(Outcome.FAILED, error))
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
            self.generator.generate([Request(prompt_ids=(0, 0), max_tokens=2, ignore_eos=True)])
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

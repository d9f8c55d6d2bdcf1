"""The thread that owns the generator: jobs in, events out, between two steps everything else."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dflash_trt.backends.base import Executor
from dflash_trt.errors import DflashError, one_line
from dflash_trt.runtime import Generator, Request, RequestFailedError, TokenEvent
from dflash_trt.serving.server.jobs import Failure, Job, Outcome

_log = logging.getLogger(__name__)

_TOO_LATE = Failure(Outcome.TIMED_OUT, DflashError("the deadline has passed", where="timeout"))
_CLOSED = Failure(Outcome.FAILED, DflashError("the server is shutting down"))


@dataclass(frozen=True, slots=True)
class OpenGenerator:
    """A generator and the executor to close with it."""

    generator: Generator
    executor: Executor


@dataclass(frozen=True, slots=True)
class Load:
    """What the generator holds between two steps; `waiting` counts jobs that have no slot yet."""

    steps: int = 0
    active: int = 0
    waiting: int = 0
    cached_tokens: int = 0
    cache_usage: float = 0.0


class GeneratorWorker:
    """Runs jobs on a generator of its own, `capacity` of them at a time at most.

    Args:
        open_generator: opens a generator; called again when an executor has failed.
        capacity: jobs in slots and in the queue together.
    """

    def __init__(
        self,
        open_generator: Callable[[], OpenGenerator],
        capacity: int,
    ) -> None:
        self._open_generator = open_generator
        self._capacity = capacity
        self._changed = threading.Condition()
        self._arrived: deque[Job] = deque()
        self._live: dict[int, Job] = {}
        self._failures: dict[int, Failure] = {}
        self._held = 0
        self._closing = False
        self._broken: DflashError | None = None
        self._open: OpenGenerator | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.load = Load()

    def start(self) -> None:
        """Opens and warms the generator up, then takes jobs.

        Raises:
            DflashError: it does not open, or does not run.
        """
        self._open = self._reopen()
        self._thread.start()

    def check(self, request: Request) -> None:
        """Raises DflashError (usage) when the generator cannot run `request`."""
        if self._open is not None:
            self._open.generator.check(request)

    def submit(self, job: Job) -> None:
        """Queues `job`; its listener hears the rest, a refusal for lack of room included."""
        with self._changed:
            refusal = self._find_refusal()
            if refusal is None:
                self._held += 1
                self._arrived.append(job)
                self._changed.notify()
        if refusal is not None:
            job.listener(refusal)

    def close(self) -> None:
        """Ends every job with a failure, and the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _find_refusal(self) -> Failure | None:
        if self._closing:
            return _CLOSED
        if self._broken is not None:
            return Failure(Outcome.FAILED, self._broken)
        if self._held >= self._capacity:
            return Failure(
                Outcome.OVERFLOW,
                DflashError(
                    f"the queue is full: {self._held} requests are running or waiting",
                    fix="try again later",
                ),
            )
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._arrived or self._live or self._closing)
                if self._closing:
                    break
                arrived = list(self._arrived)
                self._arrived.clear()
            try:
                self._turn(arrived)
            except Exception as error:
                self._recover(error)
        self._end_all(_CLOSED)
        if self._open is not None:
            self._open.executor.close()

    def _turn(self, arrived: list[Job]) -> None:
        """What was asked for since the last step, then a step."""
        generator = self._generator
        for job in arrived:
            try:
                self._live[generator.submit(job.request, job.arrived_at)] = job
            except DflashError as error:
                self._end(job, Failure(Outcome.REFUSED, error))
        for request_id, job in self._live.items():
            if request_id in self._failures:
                continue
            if job.overdue:
                self._drop(request_id, _TOO_LATE)
            elif job.cancelled:
                generator.cancel(request_id)
        try:
            events = generator.step()
        except RequestFailedError as error:
            self._drop(error.request_id, Failure(Outcome.FAILED, error))
            return  # what the step had done for the others comes with the next one
        for event in events:
            self._deliver(event)
        self.load = Load(
            self.load.steps + 1,
            generator.used_slots,
            max(len(self._live) - generator.used_slots, 0),
            generator.cached_tokens,
            generator.cache_usage,
        )

    @property
    def _generator(self) -> Generator:
        assert self._open is not None
        return self._open.generator

    def _drop(self, request_id: int, failure: Failure) -> None:
        """Frees the slot; the cancelled request's last event then delivers `failure`."""
        self._failures[request_id] = failure
        self._generator.cancel(request_id)

    def _deliver(self, event: TokenEvent) -> None:
        if event.result is None:
            self._live[event.request_id].listener(event)
            return
        job = self._live.pop(event.request_id)
        self._end(job, self._failures.pop(event.request_id, event))

    def _end(self, job: Job, last: TokenEvent | Failure) -> None:
        with self._changed:
            self._held -= 1
        job.listener(last)

    def _end_all(self, failure: Failure) -> None:
        """Ends what is in the generator and what is still on its way there."""
        with self._changed:
            jobs = [*self._live.values(), *self._arrived]
            self._arrived.clear()
        self._live.clear()
        self._failures.clear()
        for job in jobs:
            self._end(job, failure)

    def _recover(self, error: Exception) -> None:
        """Fails every job in the generator and opens another; without one, refuses all to come."""
        reason = error.message if isinstance(error, DflashError) else one_line(repr(error))
        _log.error("the executor failed: %s", reason, exc_info=error)
        failed, self._open = self._open, None
        failure = Failure(Outcome.FAILED, DflashError(f"the executor failed: {reason}"))
        jobs, self._live = list(self._live.values()), {}
        self._failures.clear()
        for job in jobs:
            self._end(job, failure)
        self.load = Load(steps=self.load.steps)
        try:
            if failed is not None:
                failed.executor.close()
            self._open = self._reopen()
        except Exception as again:
            _log.error("and could not be opened again", exc_info=again)
            with self._changed:
                self._broken = DflashError(
                    f"the executor failed and could not be opened again: {one_line(again)}",
                    fix="restart the server",
                )
            self._end_all(Failure(Outcome.FAILED, self._broken))

    def _reopen(self) -> OpenGenerator:
        """A generator that has proved to run: loading done, buffers allocated, kernels chosen."""
        opened = self._open_generator()
        try:
            warm_up = Request(prompt_ids=(0, 0), max_tokens=2, ignore_eos=True)
            opened.generator.generate([warm_up])
        except BaseException:
            opened.executor.close()
            raise
        return opened

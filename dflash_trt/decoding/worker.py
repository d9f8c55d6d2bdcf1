"""The thread that owns the generator. It takes jobs and cancellations between two steps."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from enum import Enum

from dflash_trt.decoding.jobs import Failure, Job, JobRunner, Load, Outcome
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.statistics import RunningTotals
from dflash_trt.errors import DflashError, one_line

_log = logging.getLogger(__name__)


class Phase(Enum):
    """What a worker's thread does; a turn is a step of all jobs, or a chunk of a prompt with it."""

    IDLE = "idle"
    TURN = "turn"
    OPENING = "opening"
    BROKEN = "broken"


class GeneratorWorker:
    """Runs jobs on a thread of its own.

    Args:
        open_runner: opens a generator; called again when an executor has failed. It may have jobs.
        capacity: jobs in slots and in the queue together; None is any number. A flow with less
            than its share of them may have it beyond, which is never twice as many.
        owner: the name that messages use for what it serves.
        remedy: what to do when no other generator opens.
        on_phase: told each phase as it begins, on the worker's thread.
    """

    def __init__(
        self,
        open_runner: Callable[[], JobRunner],
        capacity: int | None = None,
        *,
        owner: str = "server",
        remedy: str = "restart the server",
        on_phase: Callable[[Phase], None] = lambda _: None,
    ) -> None:
        self._open_runner = open_runner
        self._capacity = capacity
        self._closed = Failure(Outcome.FAILED, DflashError(f"the {owner} is shutting down"))
        self._remedy = remedy
        self._on_phase = on_phase
        self._changed = threading.Condition()
        self._arrived: deque[Job] = deque()
        self._closing = False
        self._broken: DflashError | None = None
        self._runner: JobRunner | None = None
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self.load = Load()
        self.totals = RunningTotals()  # of the generator that is open, and no other's

    def start(self) -> None:
        """Opens the generator, warms it up unless it runs already, then takes jobs.

        Raises:
            DflashError: it does not open, or does not run.
        """
        self._runner = self._open()
        self._thread.start()

    def check(self, request: Request) -> None:
        """Raises DflashError (usage) when the generator cannot run `request`."""
        if (runner := self._runner) is not None:  # any thread may ask, while another opens one
            runner.generator.check(request)

    def submit(self, job: Job) -> None:
        """Queues `job`; its listener hears the rest, a refusal for lack of room included."""
        with self._changed:
            refusal = self._find_refusal(job)
            if refusal is None:
                self._arrived.append(job)
                self._changed.notify()
        if refusal is not None:
            job.listener(refusal)

    def close(self) -> None:
        """Ends every job with a failure, and the thread; closes the executor."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _find_refusal(self, job: Job) -> Failure | None:
        if self._closing:
            return self._closed
        if self._broken is not None:
            return Failure(Outcome.FAILED, self._broken)
        held = len(self._arrived) + (0 if self._runner is None else self._runner.live)
        if self._capacity is not None and held >= self._capacity and not self._has_share(job):
            what = f"the queue is full: {held} requests are running or waiting"
            return Failure(Outcome.OVERFLOW, DflashError(what, fix="try again later"))
        return None

    def _has_share(self, job: Job) -> bool:
        """Whether a full queue owes the flow of `job` a place, because larger ones fill it."""
        flows = Counter(one.flow for one in self._arrived)
        flows.update(() if self._runner is None else self._runner.flows)
        places = (self._capacity or 0) // len(flows.keys() | {job.flow})
        return flows[job.flow] < places

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._has_reason_to_wake():
                    self._on_phase(Phase.IDLE if self._broken is None else Phase.BROKEN)
                    self._changed.wait_for(self._has_reason_to_wake)
                if self._closing:
                    break
                # Under the lock: a job is counted once, here or there.
                while self._arrived and self._runner is not None:
                    self._runner.add(self._arrived.popleft())
            try:
                assert self._runner is not None
                self._on_phase(Phase.TURN)
                self._runner.turn()
                self.load = self._runner.load
            except Exception as error:
                self._recover(error)
        self._end_all(self._closed)
        if self._runner is not None:
            self._runner.executor.close()

    def _has_reason_to_wake(self) -> bool:
        has_jobs = self._runner is not None and self._runner.live > 0
        return has_jobs or bool(self._arrived) or self._closing

    def _end_all(self, failure: Failure) -> None:
        with self._changed:
            jobs = [] if self._runner is None else self._runner.take_jobs()
            jobs += self._arrived
            self._arrived.clear()
        for job in jobs:
            job.listener(failure)

    def _recover(self, error: Exception) -> None:
        reason = error.message if isinstance(error, DflashError) else one_line(repr(error))
        _log.error("the executor failed: %s", reason, exc_info=error)
        failed, self._runner = self._runner, None
        assert failed is not None
        failure = Failure(Outcome.FAILED, DflashError(f"the executor failed: {reason}"))
        for job in failed.take_jobs():
            job.listener(failure)
        self.load = Load()
        self._on_phase(Phase.OPENING)
        try:
            failed.executor.close()
            self._runner = self._open()
        except Exception as again:
            _log.error("and could not be opened again", exc_info=again)
            with self._changed:
                what = f"the executor failed and could not be opened again: {one_line(again)}"
                self._broken = DflashError(what, fix=self._remedy)
            self._end_all(Failure(Outcome.FAILED, self._broken))

    def _open(self) -> JobRunner:
        runner = self._open_runner()
        if not runner.live:
            runner.warm_up()
        self.totals = runner.generator.totals
        return runner

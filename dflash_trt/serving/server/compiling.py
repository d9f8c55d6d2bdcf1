"""Compiles the grammars of requests beside everything else: one may take seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from dflash_trt.decoding.jobs import Failure, Job, Outcome
from dflash_trt.errors import DflashError
from dflash_trt.serving.server.replies import as_failure
from dflash_trt.text.grammar import Follower, Grammar, GrammarCompiler


class CompilingQueue:
    """Passes jobs on with their grammars compiled: at once where one is known, else in turn.

    Args:
        grammars: what compiles them.
        most_waiting: jobs whose grammars may wait; one more is told to come again.
        submit: takes a job that can run.
        check: raises DflashError for a request that cannot.
        record: told of each job's grammar, whether it could be used.
    """

    def __init__(
        self,
        grammars: GrammarCompiler,
        most_waiting: int,
        *,
        submit: Callable[[Job], None],
        check: Callable[[Job], None],
        record: Callable[[bool], None],
    ) -> None:
        self._grammars, self._most_waiting = grammars, most_waiting
        self._submit, self._check, self._record = submit, check, record
        self._room = threading.BoundedSemaphore(most_waiting)
        self._closing = False
        # The process that tries them does one at a time.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def submit(self, job: Job, grammar: Grammar) -> None:
        """Passes `job` on, now or later; its listener hears of a grammar that cannot be used."""
        if self._pass_on(job, lambda: self._grammars.find(grammar)):
            return
        if self._room.acquire(blocking=False):
            self._thread.submit(self._compile, job, grammar)
            return
        what = f"{self._most_waiting} grammars wait to be compiled"
        error = DflashError(what, where="grammar", fix="try again later")
        job.listener(Failure(Outcome.OVERFLOW, error))

    def close(self) -> None:
        """Waits for the grammar that is being compiled, and ends the jobs behind it."""
        self._closing = True
        self._thread.shutdown()

    def _compile(self, job: Job, grammar: Grammar) -> None:
        self._room.release()
        if self._closing:
            failure = Failure(Outcome.FAILED, DflashError("the server is shutting down"))
            job.listener(failure)
        elif job.cancelled or job.overdue:
            self._submit(job)  # which ends it before its first step
        else:
            self._pass_on(job, lambda: self._grammars.compile(grammar))

    def _pass_on(self, job: Job, get: Callable[[], Follower | None]) -> bool:
        """Whether the job has gone on, or has ended: False where nothing is known yet."""
        try:
            follower = get()
            if follower is None:
                return False
            job.request = replace(job.request, grammar=follower)
            self._check(job)
        except Exception as error:
            self._record(False)
            job.listener(as_failure(error))
            return True
        self._record(True)
        self._submit(job)
        return True

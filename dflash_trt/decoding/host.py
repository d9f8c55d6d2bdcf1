"""A generator in the user's process; steps run on the waiting thread, or on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import suppress
from queue import SimpleQueue

from dflash_trt.decoding.jobs import Failure, Job, JobRunner
from dflash_trt.decoding.request import Request, TokenEvent
from dflash_trt.decoding.worker import GeneratorWorker
from dflash_trt.errors import DflashError

Heard = tuple[int, TokenEvent | Failure]


class GeneratorHost:
    """Shares one generator between all that call it; what runs at the same time is batched.

    Steps run on the thread that waits for their events until `stream` is called for the first
    time. From then on a worker's thread runs them.

    Args:
        open_runner: opens a generator; called at the first need, and when an executor has failed.
    """

    def __init__(self, open_runner: Callable[[], JobRunner]) -> None:
        self._open_runner = open_runner
        self._lock = threading.Lock()
        self._runner: JobRunner | None = None
        self._worker: GeneratorWorker | None = None
        self._closed = False

    def open(self) -> JobRunner:
        """The generator and its executor, opened now unless they were.

        Raises:
            DflashError: they do not open, or the host is closed.
        """
        with self._lock:
            return self._opened()

    def close(self) -> None:
        """Ends what runs and closes the executor; nothing more is taken."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if was_closed:
            return
        if self._worker is not None:
            self._worker.close()
        elif self._runner is not None:
            self._runner.executor.close()

    def events(
        self, requests: Sequence[Request]
    ) -> Generator[tuple[int, TokenEvent], bool | None, None]:
        """What happens to `requests` until all ended: each event, with the index of its request.

        To be sent True for an event cancels its request, whose result is still to come. Nothing
        begins before the first event is asked for. Closing the iterator cancels the requests that
        have not ended; their slots are free before the next step.

        Raises:
            DflashError: a request cannot run or go on; the others have ended by then.
            Exception: the executor's own, as it came.
        """
        heard: SimpleQueue[Heard] = SimpleQueue()

        def listen(index: int) -> Callable[[TokenEvent | Failure], None]:
            return lambda event: heard.put((index, event))

        jobs = [
            Job(request=one, listener=listen(index), flow=heard)
            for index, one in enumerate(requests)
        ]
        left = len(jobs)
        failure: DflashError | None = None
        try:
            for job in jobs:
                self._submit(job)
            while left:
                index, event = self._next(heard)
                if isinstance(event, Failure):
                    left, failure = left - 1, failure or event.error
                    continue
                left -= event.result is not None
                if (yield index, event):
                    jobs[index].cancelled = True
            if failure is not None:
                raise failure
        finally:
            self._cancel(jobs)

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """What happens to `request`; the event loop goes on meanwhile.

        Closing the iterator, or cancelling the task that waits in it, cancels the request; its
        slot is free before the next step.

        Raises:
            DflashError: the request cannot run or go on, or the executor failed.
        """
        worker = await asyncio.to_thread(self._start_worker)
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[TokenEvent | Failure] = asyncio.Queue()

        def listen(event: TokenEvent | Failure) -> None:
            with suppress(RuntimeError):  # the loop was closed before its streams
                loop.call_soon_threadsafe(heard.put_nowait, event)

        job = Job(request=request, listener=listen)
        try:
            worker.submit(job)
            while True:
                event = await heard.get()
                if isinstance(event, Failure):
                    raise event.error
                yield event
                if event.result is not None:
                    return
        finally:
            job.cancelled = True

    def _opened(self) -> JobRunner:
        if self._closed:
            raise DflashError("the pair is closed", fix="load the bundle again", usage=True)
        if self._runner is None:
            self._runner = self._open_runner()
        return self._runner

    def _submit(self, job: Job) -> None:
        with self._lock:
            if self._worker is None:
                self._opened().add(job)
                return
        self._worker.submit(job)

    def _next(self, heard: SimpleQueue[Heard]) -> Heard:
        """The next event; this thread runs steps for it unless another thread does."""
        with self._lock:
            if self._worker is None:
                runner = self._opened()
                while heard.empty():
                    runner.turn()
        return heard.get()

    def _cancel(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.cancelled = True
        # Whoever holds the lock will look at the jobs with its next step. It may be this very
        # thread: the garbage collector closes iterators anywhere.
        if self._lock.acquire(blocking=False):
            try:
                if self._worker is None and self._runner is not None and not self._closed:
                    self._runner.drop_ended()
            finally:
                self._lock.release()

    def _start_worker(self) -> GeneratorWorker:
        with self._lock:
            if self._worker is None:
                opened = [self._opened()]

                def lend() -> JobRunner:
                    """The open runner, or a new one after a failure."""
                    self._runner = opened.pop() if opened else self._open_runner()
                    return self._runner

                worker = GeneratorWorker(lend, owner="pair", remedy="load the bundle again")
                worker.start()
                self._worker = worker
            return self._worker

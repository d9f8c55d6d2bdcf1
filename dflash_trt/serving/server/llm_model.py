"""The Triton server model `tensorrt_llm`: a bundle behind the LLM-API contract."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from dflash_trt.bundle.bundle import bound_memory, open_bundle
from dflash_trt.core.publish import hold_folder
from dflash_trt.decoding import RequestStatistics, TokenEvent
from dflash_trt.decoding.drafter_kinds import NOBODY, DrafterKind, Drafting
from dflash_trt.decoding.jobs import Failure, Job, Outcome
from dflash_trt.decoding.tuning.break_even import tuned_ratio
from dflash_trt.decoding.tuning.bundle_schedule import AUTO, NONE
from dflash_trt.decoding.worker import GeneratorWorker
from dflash_trt.errors import DflashError
from dflash_trt.pair import LoadedPair
from dflash_trt.serving.client.wire import FLOW
from dflash_trt.serving.server.generation import GenerationReader, StreamingText
from dflash_trt.serving.server.heartbeat import HeartbeatWriter
from dflash_trt.serving.server.inputs import (
    STOP_IDS,
    ModelSettings,
    Tensors,
    read_scalar,
    refuse,
    shown,
)
from dflash_trt.serving.server.metrics import Metrics
from dflash_trt.serving.server.replies import CancellationWatch, Channel, Reply, as_failure
from dflash_trt.text.grammar import Follower, Grammar, GrammarCompiler


class CompilingQueue:
    """Passes jobs on with their grammars compiled: at once where one is known, else in turn.

    The grammars of `most_waiting` jobs may wait; one more job is told to come again. `worker` runs
    them, `metrics` count their grammars.
    """

    def __init__(
        self,
        grammars: GrammarCompiler,
        most_waiting: int,
        worker: GeneratorWorker,
        metrics: Metrics,
    ) -> None:
        self._grammars, self._most_waiting = grammars, most_waiting
        self._worker, self._metrics = worker, metrics
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
            self._worker.submit(job)  # which ends it before its first step
        else:
            self._pass_on(job, lambda: self._grammars.compile(grammar))

    def _pass_on(self, job: Job, get: Callable[[], Follower | None]) -> bool:
        """Whether the job has gone on, or has ended: False where nothing is known yet."""
        try:
            follower = get()
            if follower is None:
                return False
            job.request = replace(job.request, grammar=follower)
            self._worker.check(job.request)
        except Exception as error:
            self._metrics.record_grammar(False)
            job.listener(as_failure(error))
            return True
        self._metrics.record_grammar(True)
        self._worker.submit(job)
        return True


_REPLY_THREADS = 2
_SWITCH_INTERVAL_S = 0.0002


class TritonPythonModel:
    """Triton server's interface: `initialize`, `execute` for each request, `finalize`.

    When an executor has failed and none opens in its place, every request is refused at once with
    advice to restart the server, but readiness stays true: a Python model cannot take it back,
    and Triton server 2.51 calls even a model ready whose process has died. The heartbeat tells
    `dflash-trt serve`, which starts another server.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        """Opens the bundle beside model.py and warms it up; the model is ready when it returns."""
        import triton_python_backend_utils as utils

        self._utils = utils
        # By default the generator's thread may wait 5 ms, longer than a step, for one that replies.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        settings = ModelSettings(args)
        speculation = settings.read("speculation", bool)
        follows = speculation and settings.read("block_schedule", bool)
        hold_folder(settings.version_folder.parents[1])  # `package` asks
        bundle = open_bundle(settings.version_folder / "bundle")
        bound_memory(bundle)
        pair = LoadedPair(
            bundle,
            threads=settings.read("threads", Literal["auto"] | PositiveInt),
            speculation=speculation,
            block_schedule=AUTO if follows else NONE,
            drafter=settings.read("drafter", DrafterKind),
        )
        limits, queue = pair.bundle.manifest.limits, settings.read("max_queue_size", NonNegativeInt)
        self._reader = GenerationReader(
            pair.tokenizer,
            limits.max_seq_len,
            settings.read("streaming_text", StreamingText),
            speculation=speculation,
        )
        capacity = limits.max_batch + queue
        beat = HeartbeatWriter().beat
        self._worker = GeneratorWorker(pair.open_runner, capacity, on_phase=beat)
        self._request_seconds = settings.read("request_seconds", NonNegativeInt)
        self._worker.start()
        drafter = settings.read("drafter", DrafterKind) if speculation else NOBODY
        about = describe_decoding(pair, drafter, follows=follows)
        self._metrics = Metrics(utils, self._worker, about, limits.max_batch, queue)
        self._compiling = CompilingQueue(pair.grammars, capacity, self._worker, self._metrics)
        self._replies = ThreadPoolExecutor(_REPLY_THREADS, "reply")
        self._watch = CancellationWatch()
        self._lock = threading.Lock()
        self._jobs: dict[str, list[Job]] = {}

    def execute(self, requests: list[Any]) -> None:
        """Takes requests; their replies come from other threads."""
        for request in requests:
            channel = Channel(self._utils, request)
            try:
                self._take(request, channel)
            except Exception as error:
                failure = as_failure(error)
                self._metrics.record(failure.outcome)
                channel.fail(failure)

    def finalize(self) -> None:
        """Ends what is still running."""
        self._compiling.close()
        self._worker.close()
        self._replies.shutdown()
        self._watch.close()
        self._metrics.close()

    def _take(self, request: Any, channel: Channel) -> None:
        arrived_at, arrived_ns = time.perf_counter(), time.time_ns()
        tensors: Tensors = {one.name(): one.as_numpy() for one in request.inputs()}
        request_id, parameters = request.request_id(), channel.parameters
        if read_scalar(tensors, "stop", bool):
            self._stop([request_id, *str(parameters.get(STOP_IDS, "")).split()])
            channel.end()
            return
        generation = self._reader.read(tensors, parameters)
        self._worker.check(generation.request)
        own_us = request.timeout() or parameters.get("timeout_us", 0)
        if type(own_us) is not int or own_us < 0:
            raise refuse("timeout_us", f"{shown(own_us)} is not a whole number of at least 0")
        limits_s = [one for one in (own_us / 1e6, self._request_seconds) if one]

        def forget(last: TokenEvent | Failure) -> None:
            self._forget(request_id, job, channel)
            self._metrics.record(*name_outcome(last))

        reply = Reply(channel, generation, self._replies, arrived_ns, forget)
        job = Job(
            request=generation.request,
            listener=reply.take,
            deadline=arrived_at + min(limits_s) if limits_s else None,
            arrived_at=arrived_at,
            flow=parameters.get(FLOW),
        )
        with self._lock:
            self._jobs.setdefault(request_id, []).append(job)
        if "acknowledge" in generation.wanted:
            channel.send({}, final=False)
        self._watch.add(channel, lambda: setattr(job, "cancelled", True))
        if generation.grammar is None:
            self._worker.submit(job)
        else:
            self._compiling.submit(job, generation.grammar)

    def _stop(self, request_ids: Iterable[str]) -> None:
        """Cancels every request of those ids; an empty one names none."""
        with self._lock:
            for request_id in filter(None, request_ids):
                for job in self._jobs.get(request_id, []):
                    job.cancelled = True

    def _forget(self, request_id: str, job: Job, channel: Channel) -> None:
        self._watch.remove(channel)
        with self._lock:
            self._jobs[request_id].remove(job)
            if not self._jobs[request_id]:
                del self._jobs[request_id]


def describe_decoding(pair: LoadedPair, drafter: Drafting, *, follows: bool) -> dict[str, str]:
    """Labels of `dflash_build_info`: what is served, who drafts, and how long blocks are."""
    manifest, schedule = pair.bundle.manifest, pair.schedule
    words: str = "live" if follows else NOBODY if drafter == NOBODY else "fixed"
    if schedule is not None:
        words = schedule.describe().partition(";")[0]
    block, ratio = manifest.limits.block_size if drafter != NOBODY else 1, tuned_ratio(schedule)
    about = {"model": manifest.name, "drafter": drafter, "block_schedule": words}
    return about | {"block_size": f"{block}"} | ({"tuned_ratio": f"{ratio:.2f}"} if ratio else {})


def name_outcome(last: TokenEvent | Failure) -> tuple[Outcome, RequestStatistics | None]:
    """What the metrics count a request as."""
    if isinstance(last, Failure):
        return last.outcome, None
    assert last.result is not None
    cancelled = last.result.finish_reason == "cancelled"
    return Outcome.CANCELLED if cancelled else Outcome.COMPLETED, last.result.statistics

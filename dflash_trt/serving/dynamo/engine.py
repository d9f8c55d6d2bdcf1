"""A bundle behind Dynamo 1.6's interface of engines: token ids in, token ids out.

This module needs the packages of `deploy/dynamo/requirements.txt`; no other one imports it but the
command.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import prometheus_client
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, PushSource
from dynamo.common.backend.run import run
from dynamo.common.utils.namespace import get_worker_namespace
from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument

from dflash_trt.bundle.bundle import Bundle, bound_memory, load_tokenizer, open_bundle
from dflash_trt.bundle.sampling_defaults import read_sampling_defaults
from dflash_trt.decoding import Request, RequestFailedError, TokenEvent
from dflash_trt.decoding.drafter_kinds import DFLASH, NOBODY
from dflash_trt.decoding.jobs import Failure, Job, JobRunner, Outcome
from dflash_trt.decoding.worker import GeneratorWorker
from dflash_trt.errors import DflashError, one_line
from dflash_trt.pair import LoadedPair
from dflash_trt.serving.dynamo.card import write_card
from dflash_trt.serving.dynamo.chunks import Chunk, ChunkWriter, end_together
from dflash_trt.serving.dynamo.figures import PrometheusFamilies
from dflash_trt.serving.dynamo.pulse import Pulse
from dflash_trt.serving.dynamo.shared_pages import SharedPages
from dflash_trt.serving.dynamo.token_request import TokenRequest, read_request
from dflash_trt.serving.server.llm_model import CompilingQueue, describe_decoding, name_outcome
from dflash_trt.serving.server.metrics import Metrics
from dflash_trt.serving.server.repository import RepositoryOptions

# Fields of Dynamo's WorkerConfig that are set by its own variables.
_VARIABLES = {
    "discovery_backend": "DYN_DISCOVERY_BACKEND",
    "request_plane": "DYN_REQUEST_PLANE",
    "response_plane": "DYN_RESPONSE_PLANE",
    "event_plane": "DYN_EVENT_PLANE",
    "tool_call_parser": "DYN_TOOL_CALL_PARSER",
    "reasoning_parser": "DYN_REASONING_PARSER",
    "custom_jinja_template": "DYN_CUSTOM_JINJA_TEMPLATE",
}
# What an end means to Dynamo: requests are moved away from an engine that is shut down, and it gets
# no more for some seconds; nor does one that answers 408 or 504. The other errors end the request.
_ERRORS: dict[Outcome, Callable[[str], Exception]] = {
    Outcome.REFUSED: InvalidArgument,
    Outcome.OVERFLOW: partial(HttpError, 503),
    Outcome.TIMED_OUT: partial(HttpError, 503),
    Outcome.FAILED: EngineShutdown,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What a worker serves and where Dynamo finds it; the rest are Dynamo's DYN_ variables.

    `endpoint` is namespace, component and endpoint, as `dynamo.backend.generate`.
    """

    bundle: Path
    decoding: RepositoryOptions
    endpoint: tuple[str, str, str]
    model_name: str


class BundleEngine(LLMEngine):  # type: ignore[misc]  # Dynamo is not installed where types are checked
    """A bundle and its generator, for Dynamo's worker to drive."""

    def __init__(self, options: WorkerOptions, bundle: Bundle, card: Path) -> None:
        self._options, self._card = options, card
        bound_memory(bundle)
        decoding = options.decoding
        self._defaults = read_sampling_defaults(bundle)
        self._pair = LoadedPair(
            bundle,
            threads=decoding.threads,
            speculation=decoding.speculation,
            block_schedule=decoding.block_schedule,
            drafter=DFLASH if decoding.drafter == NOBODY else decoding.drafter,
        )
        limits = bundle.manifest.limits
        self._limits, self._capacity = limits, limits.max_batch + decoding.max_queue_size
        self._pages: SharedPages | None = None
        self._snapshots: Any = None
        self._pulse = Pulse(limits.prefill_chunk + limits.max_batch * limits.block_size, self._look)
        self._worker = GeneratorWorker(
            self._open_runner, self._capacity, owner="worker", on_phase=self._pulse.beat
        )
        self._registry = prometheus_client.CollectorRegistry()
        self._metrics: Metrics | None = None
        self._compiling: CompilingQueue | None = None
        self._jobs: dict[str, list[Job]] = {}

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[BundleEngine, WorkerConfig]:
        """Never called: `dflash-trt dynamo-worker` has read the arguments."""
        raise NotImplementedError

    async def start(self, worker_id: int) -> EngineConfig:
        """Opens the bundle, tries it, and says what it can hold."""
        await asyncio.to_thread(self._worker.start)
        drafter = self._options.decoding.drafter
        about = describe_decoding(
            self._pair, drafter, follows=self._options.decoding.block_schedule == "auto"
        )
        about["model"] = self._options.model_name
        slots, queue = self._limits.max_batch, self._options.decoding.max_queue_size
        families = PrometheusFamilies(prometheus_client, self._registry)
        self._metrics = Metrics(families, self._worker, about, slots, queue)
        self._compiling = CompilingQueue(
            self._pair.grammars, self._capacity, self._worker, self._metrics
        )
        await self._try()
        self._pulse.calibrate()
        pool = None if self._pages is None else self._pages.pool
        return EngineConfig(
            model=str(self._card),
            served_model_name=self._options.model_name,
            llm=LlmRegistration(
                context_length=self._limits.max_seq_len,
                max_num_seqs=slots,
                max_num_batched_tokens=self._limits.prefill_chunk,
                kv_cache_block_size=None if pool is None else pool.page_size,
                total_kv_blocks=None if pool is None else pool.kinds[None],
            ),
        )

    async def generate(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a request's choices, as they come."""
        arrived_at = time.perf_counter()
        try:
            wanted = read_request(request, context.id(), self._defaults)
            if (count := len(wanted.choices)) > self._capacity:
                what = f"{count} is more than the {self._capacity} that this worker holds at once"
                raise DflashError(what, where="n", usage=True)
            for one in wanted.choices:
                self._worker.check(one)
        except DflashError as error:
            self._record(Failure(Outcome.REFUSED, error))
            raise InvalidArgument(error.message) from error
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[tuple[int, TokenEvent | Failure]] = asyncio.Queue()

        def listen(place: int, event: TokenEvent | Failure) -> None:
            if isinstance(event, Failure) or event.result is not None:
                self._record(event)
            with suppress(RuntimeError):  # the loop was closed before its streams
                loop.call_soon_threadsafe(heard.put_nowait, (place, event))

        limit_s = self._options.decoding.request_seconds
        jobs = [
            Job(
                request=one,
                listener=partial(listen, place),
                deadline=arrived_at + limit_s if limit_s else None,
                flow=heard,
                arrived_at=arrived_at,
            )
            for place, one in enumerate(wanted.choices)
        ]
        writers = [
            ChunkWriter(place, logprobs=job.request.logprobs is not None)
            for place, job in enumerate(jobs)
        ]
        self._jobs[context.id()] = jobs
        try:
            self._submit(jobs, wanted)
            ends: list[Chunk] = []
            left = len(jobs)
            while left:
                place, event = await heard.get()
                if isinstance(event, Failure):
                    raise _as_error(event)
                for chunk in writers[place].write(event):
                    if len(jobs) > 1 and "finish_reason" in chunk:
                        ends.append(chunk)
                    else:
                        yield chunk
                left -= event.result is not None
            for chunk in end_together(ends) if ends else ():
                yield chunk
        finally:
            for job in jobs:
                job.cancelled = True
            if self._jobs.get(context.id()) is jobs:  # another may have come by the same id
                del self._jobs[context.id()]

    async def abort(self, context: Any) -> None:
        """Cancels what a client no longer waits for; the next step frees its slots."""
        for job in self._jobs.get(context.id(), ()):
            job.cancelled = True

    async def cleanup(self) -> None:
        """Ends what still runs, with an error that lets it go on elsewhere."""
        self._pulse.close()
        if self._compiling is not None:
            await asyncio.to_thread(self._compiling.close)
        await asyncio.to_thread(self._worker.close)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
            self._metrics = None

    async def kv_event_sources(self) -> list[PushSource]:
        """Where the router hears of shared pages; nothing with linear caches."""
        return [] if self._pages is None else [PushSource(on_ready=self._pages.connect)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """One, where caches are paged."""
        return [] if self._pages is None else [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Keeps what takes the share of pages in use."""
        self._snapshots = publisher

    async def register_prometheus(self, metrics: Any) -> None:
        """Shows this project's figures beside Dynamo's."""
        register_engine_registry(metrics, self._registry, prefix_filters=["dflash_"])

    async def health_check_payload(self) -> dict[str, Any]:
        """One token of one, for Dynamo's canary."""
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=0)
        return payload

    def _submit(self, jobs: list[Job], wanted: TokenRequest) -> None:
        assert self._compiling is not None
        for job in jobs:
            if wanted.grammar is None:
                self._worker.submit(job)
            else:
                self._compiling.submit(job, wanted.grammar)

    async def _try(self) -> None:
        """Runs a request of few rows, whose turns say how long one may take."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[TokenEvent | Failure] = loop.create_future()

        def listen(event: TokenEvent | Failure) -> None:
            if isinstance(event, Failure) or event.result is not None:
                loop.call_soon_threadsafe(ended.set_result, event)

        trial = Request(prompt_ids=(0, 0), max_tokens=16, ignore_eos=True)
        self._worker.submit(Job(request=trial, listener=listen))
        event = await ended
        if isinstance(event, Failure):
            raise EngineShutdown(event.error.message)

    def _open_runner(self) -> JobRunner:
        runner = self._pair.open_runner()
        pool = runner.executor.limits.page_pool
        if pool is not None:
            if self._pages is None:
                self._pages = SharedPages(pool)
            self._pages.clear()
            runner.generator.observe_pages(self._pages)
        return runner

    def _record(self, last: TokenEvent | Failure) -> None:
        if self._metrics is not None:
            self._metrics.record(*name_outcome(last))

    def _look(self) -> None:
        if self._snapshots is not None and self._pages is not None:
            used, total = self._worker.load.cache_usage, self._pages.pool.kinds[None]
            self._snapshots.publish(0, ComponentSnapshot(round(used * total), total, used, 0))


def _as_error(failure: Failure) -> Exception:
    """What Dynamo is told; a request that fails alone would fail so everywhere."""
    if failure.outcome is Outcome.FAILED and isinstance(failure.error, RequestFailedError):
        return HttpError(500, failure.error.message)  # type: ignore[no-any-return]
    return _ERRORS[failure.outcome](failure.error.message)


def run_worker(options: WorkerOptions) -> None:
    """Serves until Dynamo's runtime has drained it, after SIGTERM or SIGINT.

    Raises:
        DflashError: the bundle cannot be opened or run, or Dynamo's runtime does not start.
    """
    bundle = open_bundle(options.bundle)
    card = write_card(bundle)
    engine = BundleEngine(options, bundle, card)
    chats = load_tokenizer(bundle).chat_template is not None

    async def make(_: list[str] | None) -> tuple[BundleEngine, WorkerConfig]:
        return engine, _configure(options, card, chats=chats)

    prometheus_client.disable_created_metrics()
    try:
        run(BundleEngine, engine_factory=make)
    except Exception as error:
        what = f"Dynamo's worker has ended: {one_line(error)}"
        raise DflashError(what, fix="see what it wrote before, and its DYN_ variables") from error


def _configure(options: WorkerOptions, card: Path, *, chats: bool) -> WorkerConfig:
    namespace, component, endpoint = options.endpoint
    given = {name: os.environ[one] for name, one in _VARIABLES.items() if os.environ.get(one)}
    talks = chats or "custom_jinja_template" in given
    return WorkerConfig(
        namespace=get_worker_namespace(namespace),
        component=component,
        endpoint=endpoint,
        model_name=str(card),
        served_model_name=options.model_name,
        endpoint_types="chat,completions" if talks else "completions",
        **given,
    )

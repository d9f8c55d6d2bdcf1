"""The load generator: a closed loop of given concurrency, or an open loop of Poisson arrivals."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from dflash_perf.harness.load_prompts import PromptSet
from dflash_perf.harness.records import Endpoint, RequestRecord, RunRecord, Trace
from dflash_perf.harness.sweep_config import REQUESTS_PER_STREAM, OfferedLoad, SweepConfig
from dflash_trt.decoding.loops import is_looping
from dflash_trt.errors import DflashError
from dflash_trt.serving.client.errors import ServedModelError

OPEN_LOOP_REQUESTS = 100
_ALIVE_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class LoadGenerator:
    """Runs requests of `prompts` against `endpoint` as `config` says.

    Args:
        where: the endpoint's address, for errors.
        count_tokens: the client's tokenizer, for servers that report no counts.
    """

    endpoint: Endpoint
    prompts: PromptSet
    config: SweepConfig
    where: str
    count_tokens: Callable[[str], int] | None

    def requests_of(self, load: OfferedLoad) -> int | None:
        """How many requests a run has; None if `duration_s` ends it."""
        if self.config.duration_s is not None:
            return None
        if self.config.request_count is not None:
            return self.config.request_count
        if load.concurrency is None:
            return OPEN_LOOP_REQUESTS
        return REQUESTS_PER_STREAM * load.concurrency

    async def warm_up(self, load: OfferedLoad, seed: int) -> None:
        """Sends unrecorded requests, with prompts in another order than the run's.

        Raises:
            DflashError: every request failed, or the server is gone.
        """
        streams = load.concurrency or 4
        count = streams if self.config.warmup is None else self.config.warmup
        if count:
            loop = _Loop(self, seed, count, None, f"warm-up {seed}")
            await loop.run(OfferedLoad(concurrency=streams))

    async def run(
        self, load: OfferedLoad, seed: int, on_request: Callable[[], None] = lambda: None
    ) -> RunRecord:
        """One measured run; its record includes failed requests.

        `on_request` hears of every request that has ended.

        Raises:
            DflashError: every request failed, or the server is gone.
        """
        gc.collect()
        count, duration = self.requests_of(load), self.config.duration_s
        loop = _Loop(self, seed, count, duration, str(seed), on_request)
        cpu_before, began_at = time.process_time(), time.perf_counter()
        await loop.run(load)
        cpu_s, wall_s = time.process_time() - cpu_before, time.perf_counter() - began_at
        records = sorted(map(loop.judge, loop.records), key=lambda record: record.index)
        ends = [one.sent_s + one.e2e_s for one in records if one.e2e_s is not None]
        return RunRecord(
            requests=tuple(records),
            window_s=max(ends) - min(record.sent_s for record in records),
            client_cpu_share=cpu_s / wall_s,
        )


@dataclass(slots=True)
class _Loop:
    """Sends the requests of one run or warm-up: `count`, or as many as `duration_s` allows.

    `order` seeds the order of the prompts.
    """

    generator: LoadGenerator
    seed: int
    count: int | None
    duration_s: float | None
    order: str
    on_request: Callable[[], None] = lambda: None
    began_at: float = field(default_factory=time.perf_counter)
    records: list[RequestRecord] = field(default_factory=list)
    output_ids: dict[int, bytes] = field(default_factory=dict)

    async def run(self, load: OfferedLoad) -> None:
        """Sends all requests; DflashError where none was answered, or the server is gone."""
        self.began_at = time.perf_counter()
        if load.concurrency is not None:
            await self._run_closed(load.concurrency)
        else:
            assert load.request_rate is not None
            await self._run_open(load.request_rate)
        if not any(record.completed and record.e2e_s is not None for record in self.records):
            first = next((one.error for one in self.records if one.error), "no output")
            what = f"all {len(self.records)} requests failed, the first with: {first}"
            raise DflashError(what, where=self.generator.where)

    async def _run_closed(self, streams: int) -> None:
        """`streams` workers; each sends its next request when the last one is answered."""
        traces = self._traces()

        async def work() -> None:
            for trace in traces:
                await self._send(trace)

        async with _Together() as group:
            for _ in range(streams if self.count is None else min(streams, self.count)):
                group.create_task(work())

    async def _run_open(self, rate: float) -> None:
        """Sends at exponential intervals of mean 1/rate; equal seeds give equal intervals."""
        intervals = random.Random(f"arrivals {self.seed}")
        due_at = time.perf_counter()
        async with _Together() as group:
            for trace in self._traces():
                await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
                group.create_task(self._send(trace))
                due_at += intervals.expovariate(rate)

    def judge(self, record: RequestRecord) -> RequestRecord:
        """The record with what its token ids tell, which takes too long while requests run."""
        ids = self.output_ids.get(record.index)
        if ids is None:
            return record
        return replace(record, looping=is_looping(np.frombuffer(ids, "<i4").tolist()))

    def _traces(self) -> Iterator[Trace]:
        """New requests, until there are `count` or `duration_s` is over."""
        prompts = self.generator.prompts
        for number, prompt in enumerate(islice(prompts.order(self.order), self.count)):
            taken_s = time.perf_counter() - self.began_at
            if self.duration_s is not None and taken_s >= self.duration_s:
                return
            name = prompts.set_names[prompt] if prompts.set_names else None
            yield Trace(number, prompt, set_name=name)

    async def _send(self, trace: Trace) -> None:
        generator, timeout_s = self.generator, self.generator.config.timeout_s
        prompts = generator.prompts
        prompt = prompts.texts[trace.prompt]
        schema = prompts.schemas[trace.prompt] if prompts.schemas else None
        seed = (self.seed << 20) + trace.index  # so request k is the same in every configuration
        unreachable = False
        try:
            async with asyncio.timeout(timeout_s):
                await generator.endpoint.send(prompt, seed, trace, schema)
        except ServedModelError as error:
            trace.error, unreachable = error.what, error.unreachable
        except TimeoutError:
            trace.error = f"no final response within {timeout_s:g} s"
        record = trace.to_record(self.began_at, generator.count_tokens)
        self.records.append(record)
        if record.completed and (ids := trace.output_ids()) is not None:
            self.output_ids[record.index] = ids
        self.on_request()
        if unreachable:
            await self._check_alive()

    async def _check_alive(self) -> None:
        alive = False
        with suppress(TimeoutError):
            async with asyncio.timeout(_ALIVE_TIMEOUT_S):
                alive = await self.generator.endpoint.is_alive()
        if not alive:
            raise DflashError(
                "the server stopped answering; finished runs are kept",
                where=self.generator.where,
                fix="start it again and repeat the command to continue",
            )


class _Together(asyncio.TaskGroup):
    """A task group that raises its first failure instead of an exception group."""

    async def __aexit__(self, *details: object) -> None:
        try:
            await super().__aexit__(*details)  # type: ignore[arg-type]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

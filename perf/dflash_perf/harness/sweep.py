"""A sweep: every configuration at every load, repeated, each run on disk before the next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from dflash_perf.harness.config import Configuration, Load, SweepConfig
from dflash_perf.harness.endpoint import Endpoint, open_endpoint
from dflash_perf.harness.load import LoadGenerator, RunProgress
from dflash_perf.harness.points import RunSummary
from dflash_perf.harness.prompts import Tokenizer, Workload, load_workload
from dflash_perf.harness.store import ResultStore


class SweepObserver(Protocol):
    """Whoever shows a sweep under way."""

    def plan(self, runs: int, finished: int) -> None:
        """A sweep of `runs` runs, of which `finished` are on disk already."""

    def start(self, configuration: str, load: Load, repeat: int, progress: RunProgress) -> None:
        """A run begins; `progress` changes as it goes."""

    def finish(self, summary: RunSummary) -> None:
        """The run is on disk."""


def run_sweep(
    config: SweepConfig, folder: Path, observer: SweepObserver, command: str
) -> ResultStore:
    """Measures what of `config` is not in `folder` yet.

    Repeats are the outermost loop and configurations the innermost, so that what drifts with
    time drifts for all of them alike.

    Raises:
        DflashError: wrong input, a folder of something else, a server that is not there, cannot
            do what is asked or stops answering; finished runs stay.
    """
    tokenizer = None if config.tokenizer is None else Tokenizer(Path(config.tokenizer))
    workload = load_workload(config, tokenizer)
    store = ResultStore(folder)
    with store.open_for(config, workload.digest, command):
        asyncio.run(_Sweep(config, workload, tokenizer, store, observer).run())
    return store


class _Sweep:
    def __init__(
        self,
        config: SweepConfig,
        workload: Workload,
        tokenizer: Tokenizer | None,
        store: ResultStore,
        observer: SweepObserver,
    ) -> None:
        self._config = config
        self._workload = workload
        self._tokenizer = tokenizer
        self._store = store
        self._observer = observer

    async def run(self) -> None:
        todo = [run for run in self._all() if not self._store.has(run[0].name, run[1], run[2])]
        runs = len(list(self._all()))
        self._observer.plan(runs, runs - len(todo))
        async with AsyncExitStack() as stack:
            endpoints: dict[str, Endpoint] = {}
            described: dict[str, Any] = {}
            for configuration in {one.name: one for one, _, _ in todo}.values():
                endpoint = open_endpoint(
                    configuration, self._config, counts_needed=self._tokenizer is None
                )
                stack.push_async_callback(endpoint.close)
                endpoints[configuration.name] = endpoint
                described[configuration.name] = await endpoint.describe()
            self._store.add_servers(described)
            for configuration, load, repeat in todo:
                await self._measure(endpoints[configuration.name], configuration, load, repeat)

    def _all(self) -> Iterator[tuple[Configuration, Load, int]]:
        for repeat in range(self._config.repeats):
            for load in self._config.loads:
                for configuration in self._config.configurations:
                    yield configuration, load, repeat

    async def _measure(
        self, endpoint: Endpoint, configuration: Configuration, load: Load, repeat: int
    ) -> None:
        generator = LoadGenerator(
            endpoint,
            self._workload,
            self._config,
            where=configuration.url,
            count_tokens=None if self._tokenizer is None else self._tokenizer.count,
        )
        seed = self._config.seed + repeat
        progress = RunProgress(wanted=generator.requests_of(load))
        self._observer.start(configuration.name, load, repeat, progress)
        await generator.warm_up(load, seed)
        record = await generator.run(load, seed, progress)
        record = replace(record, gpus=configuration.gpus)
        summary = RunSummary.of(
            record,
            configuration=configuration.name,
            load=load,
            repeat=repeat,
            seed=seed,
            goodput=self._config.goodput,
            exact_tokens=self._config.osl if self._config.ignore_eos else None,
        )
        self._store.add(record, summary)
        self._observer.finish(summary)

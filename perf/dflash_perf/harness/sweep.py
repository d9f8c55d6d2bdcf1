"""A sweep: every configuration at every load, repeated, each run on disk before the next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from dflash_perf.extra import require
from dflash_perf.harness.answers import loads_between
from dflash_perf.harness.config import Configuration, OfferedLoad, SweepConfig
from dflash_perf.harness.endpoint import Endpoint, open_endpoint
from dflash_perf.harness.load import LoadGenerator, RunProgress
from dflash_perf.harness.points import RunSummary
from dflash_perf.harness.prompts import PromptSet, Tokenizer, load_prompts
from dflash_perf.harness.store import ResultStore

ROUNDS = 2
"""How often a sweep looks for loads between those that were measured."""


class SweepObserver(Protocol):
    """Whoever shows a sweep under way."""

    def plan(self, runs: int, finished: int) -> None:
        """`runs` runs come, of which `finished` are on disk already; again when it refines."""

    def start(
        self, configuration: str, load: OfferedLoad, repeat: int, progress: RunProgress
    ) -> None:
        """A run begins; `progress` changes as it goes."""

    def finish(self, summary: RunSummary) -> None:
        """The run is on disk."""


class SilentObserver:
    """A `SweepObserver` that shows nothing."""

    def plan(self, runs: int, finished: int) -> None: ...

    def start(self, *details: object) -> None: ...

    def finish(self, summary: RunSummary) -> None: ...


def run_sweep(
    config: SweepConfig,
    folder: Path,
    observer: SweepObserver,
    command: str,
    refine_at: Sequence[float] = (),
) -> ResultStore:
    """Measures what of `config` is not in `folder` yet.

    Then, around each interactivity of `refine_at`, concurrencies between those that were asked
    for, as `loads_between` chooses them.

    Repeats are the outermost loop and configurations the innermost, so that what drifts with
    time drifts for all of them alike.

    Raises:
        DflashError: wrong input, a folder of something else, a server that is not there, cannot
            do what is asked or stops answering; finished runs stay.
    """
    require("a sweep", "scipy")
    tokenizer = None if config.tokenizer is None else Tokenizer(Path(config.tokenizer))
    prompts = load_prompts(config, tokenizer)
    store = ResultStore(folder)
    with store.open_for(config, prompts.digest, command):
        asyncio.run(_Sweep(config, prompts, tokenizer, store, observer).run(refine_at))
    return store


class _Sweep:
    def __init__(
        self,
        config: SweepConfig,
        prompts: PromptSet,
        tokenizer: Tokenizer | None,
        store: ResultStore,
        observer: SweepObserver,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._store = store
        self._observer = observer
        self._stack = AsyncExitStack()
        self._endpoints: dict[str, Endpoint] = {}

    async def run(self, refine_at: Sequence[float]) -> None:
        async with self._stack:
            await self._measure_all(self._config.loads)
            for _ in range(ROUNDS):
                between = loads_between(self._store.points(), refine_at)
                if not between:
                    break
                await self._measure_all(between)

    async def _measure_all(self, loads: Sequence[OfferedLoad]) -> None:
        """Every configuration at `loads`, as far as it is not on disk."""
        runs = [
            (configuration, load, repeat)
            for repeat in range(self._config.repeats)
            for load in loads
            for configuration in self._config.configurations
        ]
        todo = [run for run in runs if not self._store.has(run[0].name, run[1], run[2])]
        self._observer.plan(len(runs), len(runs) - len(todo))
        # All servers first: a sweep that cannot end should not begin.
        for configuration in {one.name: one for one, _, _ in todo}.values():
            if configuration.name not in self._endpoints:
                await self._connect(configuration)
        for configuration, load, repeat in todo:
            endpoint = self._endpoints[configuration.name]
            await self._measure(endpoint, configuration, load, repeat)

    async def _connect(self, configuration: Configuration) -> None:
        endpoint = open_endpoint(configuration, self._config, counts_needed=self._tokenizer is None)
        self._stack.push_async_callback(endpoint.close)
        described = await endpoint.describe()
        self._endpoints[configuration.name] = endpoint
        self._store.add_servers({configuration.name: described})

    async def _measure(
        self, endpoint: Endpoint, configuration: Configuration, load: OfferedLoad, repeat: int
    ) -> None:
        generator = LoadGenerator(
            endpoint,
            self._prompts,
            self._config,
            where=configuration.url,
            count_tokens=None if self._tokenizer is None else self._tokenizer.count,
        )
        seed = self._config.seed + repeat
        progress = RunProgress(wanted=generator.requests_of(load))
        self._observer.start(configuration.name, load, repeat, progress)
        await generator.warm_up(load, seed)
        record = await generator.run(load, seed, progress)
        record = replace(record, gpus=configuration.gpus, goodput=self._config.goodput)
        summary = RunSummary.of(
            record,
            configuration=configuration.name,
            load=load,
            repeat=repeat,
            seed=seed,
            exact_tokens=self._config.osl if self._config.ignore_eos else None,
        )
        self._store.add(record, summary)
        self._observer.finish(summary)

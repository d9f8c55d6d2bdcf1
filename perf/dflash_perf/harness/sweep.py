"""A sweep: every configuration at every load, repeated; each run is saved before the next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from dflash_perf.extra import require
from dflash_perf.harness.interactivity import loads_between
from dflash_perf.harness.load import LoadGenerator, RunProgress
from dflash_perf.harness.load_prompts import PromptSet, Tokenizer, load_prompts
from dflash_perf.harness.points import RunPlan, RunSummary
from dflash_perf.harness.records import Endpoint
from dflash_perf.harness.store import ResultStore
from dflash_perf.harness.sweep_config import Configuration, OfferedLoad, SweepConfig

ROUNDS = 2
"""How often a sweep looks for loads between those that were measured."""


class SweepObserver:
    """Callbacks about the progress of a sweep; a subclass that shows it overrides them."""

    def plan(self, runs: int, finished: int) -> None:
        """There are `runs` runs, `finished` of them on disk; called again for each refinement."""

    def start(self, run: RunPlan, progress: RunProgress) -> None:
        """A run begins; `progress` changes as it goes."""

    def finish(self, summary: RunSummary) -> None:
        """The run is on disk."""


def run_sweep(
    config: SweepConfig,
    folder: Path,
    observer: SweepObserver,
    command: str,
    refine_at: Sequence[float] = (),
) -> ResultStore:
    """Measures the runs of `config` that are not in `folder` yet.

    Then it measures concurrencies in between, around each interactivity of `refine_at`
    (`loads_between`). Repeats are the outermost loop and configurations the innermost, so that
    slow drift affects all configurations alike.

    Raises:
        DflashError: wrong input, a folder of something else, a server that is missing, cannot do
            what is asked or stops answering; finished runs stay.
    """
    require("a sweep", "scipy")
    tokenizer = None if config.tokenizer is None else Tokenizer(Path(config.tokenizer))
    prompts = load_prompts(config, tokenizer)
    store = ResultStore(folder)
    with store.open_for(config, prompts.digest, command):
        asyncio.run(_Sweep(config, prompts, tokenizer, store, observer).run(refine_at))
    return store


@dataclass(slots=True)
class _Sweep:
    config: SweepConfig
    prompts: PromptSet
    tokenizer: Tokenizer | None
    store: ResultStore
    observer: SweepObserver
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    endpoints: dict[str, Endpoint] = field(default_factory=dict)

    async def run(self, refine_at: Sequence[float]) -> None:
        async with self.stack:
            await self._measure_all(self.config.loads)
            for _ in range(ROUNDS):
                between = loads_between(self.store.points(), refine_at)
                if not between:
                    break
                await self._measure_all(between)

    async def _measure_all(self, loads: Sequence[OfferedLoad]) -> None:
        """Measures every configuration at `loads`, except runs that are on disk."""
        runs = [
            (configuration, RunPlan(configuration.name, load, repeat, self.config.seed + repeat))
            for repeat in range(self.config.repeats)
            for load in loads
            for configuration in self.config.configurations
        ]
        todo = [(configuration, run) for configuration, run in runs if not self.store.has(run)]
        self.observer.plan(len(runs), len(runs) - len(todo))
        # Connect to all servers first: a sweep that cannot finish should not begin.
        for configuration, _ in todo:
            if configuration.name not in self.endpoints:
                await self._connect(configuration)
        for configuration, run in todo:
            await self._measure(configuration, run)

    async def _connect(self, configuration: Configuration) -> None:
        endpoint: Endpoint
        if configuration.kind == "llm-api":
            require("a sweep over gRPC", "tritonclient", "grpc")
            from dflash_perf.harness.triton import TritonEndpoint

            needed = self.tokenizer is None
            endpoint = TritonEndpoint(configuration, self.config, counts_needed=needed)
        else:
            require("a sweep over HTTP", "aiohttp")
            from dflash_perf.harness.openai import OpenAiEndpoint

            endpoint = OpenAiEndpoint(configuration, self.config)
        self.stack.push_async_callback(endpoint.close)
        described = await endpoint.describe()
        self.endpoints[configuration.name] = endpoint
        self.store.add_servers({configuration.name: described})

    async def _measure(self, configuration: Configuration, run: RunPlan) -> None:
        generator = LoadGenerator(
            self.endpoints[configuration.name],
            self.prompts,
            self.config,
            where=configuration.url,
            count_tokens=None if self.tokenizer is None else self.tokenizer.count,
        )
        progress = RunProgress(wanted=generator.requests_of(run.load))
        self.observer.start(run, progress)
        await generator.warm_up(run.load, run.seed)
        record = await generator.run(run.load, run.seed, progress)
        record = replace(record, gpus=configuration.gpus, goodput=self.config.goodput)
        exact_tokens = self.config.osl if self.config.ignore_eos else None
        summary = RunSummary.of(run, record, exact_tokens)
        self.store.add(record, summary)
        self.observer.finish(summary)

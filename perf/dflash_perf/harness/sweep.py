"""A sweep: every configuration at every load, repeated; each run is saved before the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from dflash_perf.extra import require
from dflash_perf.harness.interactivity import loads_between
from dflash_perf.harness.load import LoadGenerator
from dflash_perf.harness.load_prompts import PromptSet, Tokenizer, load_prompts
from dflash_perf.harness.points import RunPlan, RunSummary
from dflash_perf.harness.records import Endpoint
from dflash_perf.harness.store import ResultStore
from dflash_perf.harness.sweep_config import Configuration, OfferedLoad, SweepConfig
from dflash_trt.core.progress import Progress
from dflash_trt.serving.client.draft_counts import SETTLE_S, count_between

ROUNDS = 2
"""How often a sweep looks for loads between those that were measured."""


def run_sweep(
    config: SweepConfig,
    folder: Path,
    progress: Progress,
    command: str,
    refine_at: Sequence[float] = (),
    say: Callable[[str], None] = lambda line: None,
) -> ResultStore:
    """Measures the runs of `config` that are not in `folder` yet.

    A run is a stage of `progress`; `say` gets a line for each that has ended.

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
        asyncio.run(_Sweep(config, prompts, tokenizer, store, progress, say).run(refine_at))
    return store


@dataclass(slots=True)
class _Sweep:
    config: SweepConfig
    prompts: PromptSet
    tokenizer: Tokenizer | None
    store: ResultStore
    progress: Progress
    say: Callable[[str], None]
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
        if len(todo) < len(runs):
            self.say(f"{len(runs) - len(todo)} of {len(runs)} runs are there already")
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
        label = f"{run.configuration}, {run.load.label}, run {run.repeat + 1}"
        self.progress.stage(label, generator.requests_of(run.load), "steps")
        await generator.warm_up(run.load, run.seed)
        before = await self._read_metrics(generator.endpoint)
        record = await generator.run(run.load, run.seed, lambda: self.progress.advance(1))
        emitted = sum(max((one.output_tokens or 1) - 1, 0) for one in record.completed)
        drafts = count_between(before, await self._read_metrics(generator.endpoint), emitted)
        record = replace(
            record, gpus=configuration.gpus, goodput=self.config.goodput, drafts=drafts
        )
        exact_tokens = self.config.osl if self.config.ignore_eos else None
        summary = RunSummary.of(run, record, exact_tokens)
        self.store.add(record, summary)
        throughput, tau = map(summary.values.get, ("output_throughput", "acceptance_length"))
        line = f"  {summary.completed} of {summary.requests} requests"
        line += "" if throughput is None else f", {throughput:,.0f} tokens/s"
        self.say(line if tau is None else f"{line}, τ {tau:.2f}")

    async def _read_metrics(self, endpoint: Endpoint) -> dict[str, float]:
        """Its counters, once they had the time to be told."""
        if await endpoint.read_metrics():
            await asyncio.sleep(SETTLE_S)
        return await endpoint.read_metrics()

"""A tuned bundle against the best fixed choice, by concurrency: is it ever slower?

Closed loop in process: as many requests as `--concurrency` says are in flight until all of a fixed
number are done, so every way of decoding does the same work and emits the same tokens, ramp-up and
ramp-down included. Ways are interleaved, run after run, each run in another order. The figure is
tokens/s of the tuned runtime / the best of target_only and every fixed block, by medians; the
spread is that of the neighbouring runs. Seconds are the wall's, or with `--clock cpu` those that
this process computed, which says the same of one thread and holds on a busy machine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.bundles import requests_of
from dflash_perf.bench.repeat import show, spread, spread_of_ratios, take_turns
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.pair import LoadedPair
from dflash_trt.runtime import GeneratorOptions, Request

TUNED, PLAIN = "tuned", "target_only"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def run_closed_loop(
    pair: LoadedPair,
    requests: list[Request],
    concurrency: int,
    options: GeneratorOptions,
    clock: Callable[[], float],
) -> tuple[float, int]:
    """Decodes `requests`, `concurrency` at a time: output tokens/s, and how many tokens."""
    generator = pair.make_generator(options)
    waiting = deque(requests)
    tokens = live = 0
    started = clock()
    while waiting or live:
        while waiting and live < concurrency:
            generator.submit(waiting.popleft())
            live += 1
        for event in generator.step():
            tokens += len(event.token_ids)
            live -= event.result is not None
    return tokens / (clock() - started), tokens


def summarize(rates: dict[str, list[float]]) -> Figures:
    """Figures of one concurrency from tokens/s by way, the runs in their order."""
    others = {name: median(values) for name, values in rates.items() if name != TUNED}
    best = max(others, key=others.__getitem__)
    return {
        "tuned_to_best": median(rates[TUNED]) / others[best],
        "best": best,
        "run_by_run": spread_of_ratios(rates[TUNED], rates[best]),
        "tokens_per_second": {name: spread(values) for name, values in rates.items()},
    }


@bench(runs=5)
def measure(
    work: Work,
    bundle: Path,
    *,
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
    least_requests: int = 16,
    max_tokens: int = 128,
    temperature: float = 0.0,
    prompt_file: Annotated[Path | None, "Other prompts than the bundle's."] = None,
    threads: int = 1,
    clock: Literal["wall", "cpu"] = "wall",
) -> Figures:
    if clock == "cpu" and threads > 1:
        raise DflashError("is for one thread", where="--clock cpu", usage=True)
    pair = LoadedPair(open_bundle(bundle), threads=threads, graphs=GRAPH_NAMES)
    manifest, schedule = pair.bundle.manifest, pair.schedule
    limits = manifest.limits
    if schedule is None or schedule.measured is None:
        raise DflashError("has no schedule", where=bundle, fix="`dflash-trt tune` it", usage=True)
    if max(concurrency) > limits.max_batch:
        what = f"the bundle holds {limits.max_batch} sequences"
        raise DflashError(what, where="--concurrency", usage=True)
    requests = requests_of(pair.bundle, max_tokens, temperature, prompt_file)
    chunk = limits.prefill_chunk
    options = {
        TUNED: GeneratorOptions(prefill_chunk=chunk, schedule=schedule),
        PLAIN: GeneratorOptions(speculation=False, prefill_chunk=chunk),
    }
    for block in schedule.measured.block_sizes:
        options[f"block {block}"] = GeneratorOptions(block_size=block, prefill_chunk=chunk)
    click.echo(f"schedule: {schedule.describe()}")
    by_concurrency: Figures = {}
    for level in concurrency:
        queue = list(islice(cycle(requests), max(least_requests, 2 * level)))

        def run(
            way: GeneratorOptions, queue: list[Request], level: int = level
        ) -> tuple[float, int]:
            return run_closed_loop(pair, queue, level, way, CLOCKS[clock])

        run(options[TUNED], queue[:level])  # warm up
        ways = {name: partial(run, way, queue) for name, way in options.items()}
        found = take_turns(ways, work.runs, rotate=True)
        totals = {tokens for runs in found.values() for _, tokens in runs}
        if pair.executor.is_bitwise and len(totals) > 1:
            raise AssertionError(f"ways of decoding differ in their outputs: {totals} tokens")
        figures = summarize({name: [rate for rate, _ in runs] for name, runs in found.items()})
        by_concurrency[str(level)] = figures
        _show(level, figures)
    worst = min(row["tuned_to_best"] for row in by_concurrency.values())
    click.echo(f"worst: {worst:.3f} of the best fixed choice")
    settings = {
        "prompts": len(requests),
        "least_requests": least_requests,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "threads": threads,
        "clock": clock,
    }
    return {
        "pair": manifest.name,
        "settings": settings,
        "schedule": [entry.model_dump() for entry in schedule.blocks],
        "fallback": schedule.fallback,
        "worst_tuned_to_best": worst,
        "by_concurrency": by_concurrency,
    }


def _show(level: int, figures: Figures) -> None:
    around, best = figures["run_by_run"], figures["best"]
    rates = {name: row["median"] for name, row in figures["tokens_per_second"].items()}
    click.echo(
        f"concurrency {level}: tuned / best fixed {figures['tuned_to_best']:.3f}, run by run "
        f"{show(around, '.2f')} in {around['runs']} interleaved runs; "
        f"tuned {rates[TUNED]:,.0f}, {best} {rates[best]:,.0f}, "
        f"target_only {rates[PLAIN]:,.0f} tokens/s"
    )

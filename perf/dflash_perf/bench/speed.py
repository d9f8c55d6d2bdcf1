"""Bundles of one target, each way of decoding in turn: tokens/s, acceptance, time of a step.

Every NAME=BUNDLE decodes the prompts of the first without a draft, at each block and, where `tune`
wrote one, by its schedule. As many requests as --concurrency says are in flight until all are done,
so that every way does the same work, prefill included. Ways take turns, each run in another order;
ratios are to the first bundle without a draft, run by run. Seconds are those that this process
computed, which with one thread hold on a busy machine, or the wall's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Annotated, Literal

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.repeat import (
    read_named_bundles,
    requests_of,
    show,
    spread,
    spread_of_ratios,
    take_turns,
)
from dflash_trt.decoding import GeneratorOptions, Request, total
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.pair import LoadedPair

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
LEAST_REQUESTS = 16


@bench(runs=5)
def measure(
    work: Work,
    bundle: tuple[str, ...],
    *,
    concurrency: tuple[int, ...] = (1, 4, 8),
    block: Annotated[tuple[int, ...], "Rows of a verify step."] = (4, 8),
    max_tokens: int = 128,
    temperature: float = 0.0,
    threads: int = 1,
    clock: Literal["cpu", "wall"] = "cpu",
) -> Figures:
    bundles = read_named_bundles(bundle, None).items()
    pairs = {name: LoadedPair(one, threads=threads, graphs=GRAPH_NAMES) for name, one in bundles}
    first = next(iter(pairs.values()))
    most = min(pair.bundle.manifest.limits.max_batch for pair in pairs.values())
    if max(concurrency) > most:
        what = f"the bundles hold {most} sequences"
        raise DflashError(what, where="--concurrency", usage=True)
    prompts = requests_of(first.bundle, max_tokens, temperature)
    by_concurrency: Figures = {}
    for level in concurrency:
        requests = list(islice(cycle(prompts), max(LEAST_REQUESTS, 2 * level)))
        ways = {
            f"{name}, {way}": partial(decode, pair, options, requests, level, clock)
            for name, pair in pairs.items()
            for way, options in _ways(pair, block).items()
        }
        found = take_turns(ways, work.runs, warm_up=True)
        counts = {run["output_tokens"] for runs in found.values() for run in runs}
        if first.executor.is_bitwise and len(counts) > 1:
            raise AssertionError(f"ways of decoding differ in their outputs: {counts} tokens")
        by_concurrency[str(level)] = _summarize(found, level)
    drafts = {name: pair.bundle.manifest.draft.kind for name, pair in pairs.items()}
    return {"drafts": drafts, "prompts": len(prompts), "by_concurrency": by_concurrency}


def _ways(pair: LoadedPair, blocks: Sequence[int]) -> dict[str, GeneratorOptions]:
    limits = pair.bundle.manifest.limits
    chunk = limits.prefill_chunk
    ways = {"target_only": GeneratorOptions(speculation=False, prefill_chunk=chunk)}
    for block in blocks:
        if block <= limits.block_size:
            ways[f"block {block}"] = GeneratorOptions(block_size=block, prefill_chunk=chunk)
    if pair.schedule is not None and pair.schedule.measured is not None:
        ways["tuned"] = GeneratorOptions(schedule=pair.schedule, prefill_chunk=chunk)
    return ways


def decode(
    pair: LoadedPair,
    options: GeneratorOptions,
    requests: Sequence[Request],
    concurrency: int,
    clock: str,
) -> dict[str, float]:
    """Decodes `requests`, `concurrency` at a time; the figures of that run."""
    generator = pair.make_generator(options)
    waiting, results, free, steps = iter(requests), [], concurrency, 0
    began = CLOCKS[clock]()
    while True:
        for request in islice(waiting, free):
            generator.submit(request)
        if not generator.has_work:
            break
        ended = [event.result for event in generator.step() if event.result is not None]
        results += ended
        free, steps = len(ended), steps + 1
    seconds = CLOCKS[clock]() - began
    summary = total(result.statistics for result in results)
    host = generator.step_seconds - generator.executor_seconds
    return {
        "tokens_per_second": summary.output_tokens / seconds,
        "acceptance_length": summary.acceptance_length or 1.0,
        "ms_per_step": seconds / steps * 1e3,
        "host_ms_per_step": host / steps * 1e3,
        "output_tokens": summary.output_tokens,
    }


def _summarize(found: dict[str, list[dict[str, float]]], level: int) -> Figures:
    rates = {name: [run["tokens_per_second"] for run in runs] for name, runs in found.items()}
    base = next(iter(rates.values()))
    figures: Figures = {}
    for name, runs in found.items():
        spreads = {key: spread([run[key] for run in runs]) for key in runs[0]}
        figures[name] = {**spreads, "to_baseline": spread_of_ratios(rates[name], base)}
        click.echo(
            f"concurrency {level}, {name}: × {show(figures[name]['to_baseline'], '.2f')}, "
            f"{median(rates[name]):,.0f} tokens/s, τ {runs[-1]['acceptance_length']:.2f}, "
            f"{spreads['ms_per_step']['median']:.2f} ms a step, "
            f"{spreads['host_ms_per_step']['median']:.2f} of it the host's"
        )
    for name in rates:
        if name.endswith(", tuned"):
            best = max(median(each) for other, each in rates.items() if other != name)
            figures[name]["to_best"] = median(rates[name]) / best
            click.echo(f"  {name}: {figures[name]['to_best']:.3f} of the best other way")
    return figures

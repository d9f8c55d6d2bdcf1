"""A tuned bundle against the best fixed choice, by concurrency: is it ever slower?

Closed loop in process: as many requests as `--concurrency` says are in flight until all of a fixed
number are done, so every way of decoding does the same work and emits the same tokens, ramp-up and
ramp-down included. Ways are interleaved, run after run, each run in another order. The figures are
tokens/s of the tuned runtime / the best of target_only and every fixed block, and / target_only,
by medians; the spread is that of the neighbouring runs. Seconds are the wall's, or with
`--clock cpu` those that this process computed, which with one thread hold on a busy machine.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.repeat import (
    decode_all,
    requests_of,
    show,
    spread,
    spread_of_ratios,
    take_turns,
)
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.decoding import GeneratorOptions, Request
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.pair import LoadedPair

TUNED, PLAIN = "tuned", "target_only"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def summarize(rates: dict[str, list[float]]) -> Figures:
    """Figures of one concurrency, from tokens/s of each way of decoding in run order."""
    others = {name: median(values) for name, values in rates.items() if name != TUNED}
    best = max(others, key=others.__getitem__)
    return {
        "tuned_to_best": median(rates[TUNED]) / others[best],
        "best": best,
        "run_by_run": spread_of_ratios(rates[TUNED], rates[best]),
        "tuned_to_target_only": median(rates[TUNED]) / others[PLAIN],
        "target_only_run_by_run": spread_of_ratios(rates[TUNED], rates[PLAIN]),
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
    threads: int = 1,
    plain_only: Annotated[bool, "Compare with target_only alone, with no fixed block."] = False,
    clock: Literal["wall", "cpu"] = "wall",
) -> Figures:
    pair = LoadedPair(open_bundle(bundle), threads=threads, graphs=GRAPH_NAMES)
    limits, schedule = pair.bundle.manifest.limits, pair.schedule
    if schedule is None or schedule.measured is None:
        raise DflashError("has no schedule", where=bundle, fix="`dflash-trt tune` it", usage=True)
    if max(concurrency) > limits.max_batch:
        what = f"the bundle holds {limits.max_batch} sequences"
        raise DflashError(what, where="--concurrency", usage=True)
    requests = requests_of(pair.bundle, max_tokens, temperature)
    common = GeneratorOptions(prefill_chunk=limits.prefill_chunk)
    options = {TUNED: replace(common, schedule=schedule), PLAIN: replace(common, speculation=False)}
    for block in () if plain_only else schedule.measured.block_sizes:
        options[f"block {block}"] = replace(common, block_size=block)
    click.echo(f"schedule: {schedule.describe()}")

    def run(way: GeneratorOptions, queue: list[Request], level: int) -> tuple[float, int]:
        """Output tokens/s, and the number of output tokens."""
        generator = pair.make_generator(way)
        started = CLOCKS[clock]()
        tokens = decode_all(generator, queue, level)
        return tokens / (CLOCKS[clock]() - started), tokens

    by_concurrency: Figures = {}
    for level in concurrency:
        queue = list(islice(cycle(requests), max(least_requests, 2 * level)))
        run(options[TUNED], queue[:level], level)  # warm up
        ways = {name: partial(run, way, queue, level) for name, way in options.items()}
        found = take_turns(ways, work.runs, rotate=True)
        totals = {tokens for runs in found.values() for _, tokens in runs}
        if pair.executor.is_bitwise and len(totals) > 1:
            raise AssertionError(f"ways of decoding differ in their outputs: {totals} tokens")
        figures = summarize({name: [rate for rate, _ in runs] for name, runs in found.items()})
        by_concurrency[str(level)] = figures
        _show(level, figures)
    worst = min(row["tuned_to_best"] for row in by_concurrency.values())
    click.echo(f"worst: {worst:.3f} of the best fixed choice")
    return {
        "pair": pair.bundle.manifest.name,
        "prompts": len(requests),
        "threads": threads,
        "schedule": [entry.model_dump() for entry in schedule.blocks],
        "worst_tuned_to_best": worst,
        "by_concurrency": by_concurrency,
    }


def _show(level: int, figures: Figures) -> None:
    around, best, plain = (figures[key] for key in ("run_by_run", "best", "target_only_run_by_run"))
    rates = {name: row["median"] for name, row in figures["tokens_per_second"].items()}
    click.echo(
        f"concurrency {level}: tuned / best fixed {figures['tuned_to_best']:.3f}, run by run "
        f"{show(around, '.2f')} in {around['runs']} interleaved runs; / target_only "
        f"{figures['tuned_to_target_only']:.2f}, run by run {show(plain, '.2f')}; "
        f"tuned {rates[TUNED]:,.0f}, {best} {rates[best]:,.0f}, "
        f"target_only {rates[PLAIN]:,.0f} tokens/s"
    )

"""DFlash against target_only on a bundle, by batch: tokens/s, acceptance, host time.

Every run decodes the bundle's prompts, as many at once as the batch says, for at least
`--seconds`; runs are interleaved and each ratio is between neighbours.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.repeat import requests_of, show, spread_of_ratios, spreads, take_turns
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.decoding import GeneratorOptions, Request, total
from dflash_trt.decoding.statistics import RequestStatistics
from dflash_trt.decoding.tuning.bundle_schedule import NONE
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.pair import LoadedPair


def decode(
    pair: LoadedPair,
    requests: list[Request],
    options: GeneratorOptions,
    *,
    batch: int,
    seconds: float,
) -> dict[str, float]:
    """Decodes `requests` in groups of `batch`, again and again until `seconds` have passed.

    At batch 1 `tokens_per_second` is the tokens after each request's first / decode time, without
    prefill. Above, prefill and decode overlap, and it is output tokens / wall time of the run.
    """
    generator = pair.make_generator(options)
    statistics: list[RequestStatistics] = []
    steps = 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        for first in range(0, len(requests), batch):
            results = generator.generate(requests[first : first + batch])
            statistics += [result.statistics for result in results]
            steps += max(result.statistics.steps for result in results)
            if time.perf_counter() - started >= seconds:
                break
    wall = time.perf_counter() - started
    summary = total(statistics, wall)
    if batch == 1:
        decoded = sum(one.output_tokens - 1 for one in statistics)
        rate = decoded / sum(one.decode_s or 0.0 for one in statistics)
    else:
        rate = summary.output_tokens / wall
    return {
        "tokens_per_second": rate,
        "acceptance_length": summary.acceptance_length or 1.0,
        "executor_ms_per_step": generator.executor_seconds / steps * 1e3,
        "host_ms_per_step": (generator.step_seconds - generator.executor_seconds) / steps * 1e3,
    }


@bench(runs=7)
def measure(
    work: Work,
    bundle: Path,
    *,
    batch: tuple[int, ...] = (1, 4, 8),
    block_size: Annotated[int | None, "Default: the bundle's."] = None,
    seconds: Annotated[float, "Least time of a run."] = 2.0,
    max_tokens: int = 256,
    temperature: float = 0.0,
    threads: int = 1,
) -> Figures:
    opened = open_bundle(bundle)
    requests = requests_of(opened, max_tokens, temperature)
    pair = LoadedPair(opened, threads=threads, block_schedule=NONE, graphs=GRAPH_NAMES)
    options = {
        "target_only": GeneratorOptions(speculation=False),
        "dflash": GeneratorOptions(block_size=block_size),
    }
    by_batch: Figures = {}
    for size in batch:
        run = partial(decode, pair, requests, batch=size, seconds=seconds)
        ways = {name: partial(run, one) for name, one in options.items()}
        by_batch[str(size)] = _summarize(take_turns(ways, work.runs))
        _show(size, by_batch[str(size)])
    return {"pair": opened.manifest.name, "prompts": len(requests), "by_batch": by_batch}


def _summarize(runs: dict[str, list[dict[str, float]]]) -> Figures:
    rates = {name: [run["tokens_per_second"] for run in each] for name, each in runs.items()}
    figures: Figures = {"ratio": spread_of_ratios(rates["dflash"], rates["target_only"])}
    figures["acceptance_length"] = runs["dflash"][-1]["acceptance_length"]
    for way, each in runs.items():
        found = spreads(each, "tokens_per_second", "executor_ms_per_step", "host_ms_per_step")
        figures |= {f"{way}_{name}": one for name, one in found.items()}
    return figures


def _show(batch: int, figures: Figures) -> None:
    ratio = figures["ratio"]
    click.echo(
        f"batch {batch}: DFlash / target_only {show(ratio, '.2f')} in {ratio['runs']} interleaved "
        f"runs, {figures['dflash_tokens_per_second']['median']:,.0f} and "
        f"{figures['target_only_tokens_per_second']['median']:,.0f} tokens/s, "
        f"acceptance length {figures['acceptance_length']:.2f}; host "
        f"{figures['dflash_host_ms_per_step']['median']:.3f} of "
        f"{figures['dflash_executor_ms_per_step']['median']:.2f} ms a step"
    )

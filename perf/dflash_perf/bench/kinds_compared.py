"""Drafts of several kinds for one target: acceptance, bytes, and tokens/s by concurrency.

Each NAME=BUNDLE decodes the prompts greedily and at temperature 1 at its trained block. Then all
ways, target_only and every bundle at each of `--blocks`, do the same work at each concurrency in
turn, run after run, each run in another order. Seconds are those that this process computed, which
with one thread hold on a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Annotated

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.bundles import decode_all, requests_of
from dflash_perf.bench.repeat import show, spread, spread_of_ratios, take_turns
from dflash_perf.bench.served_demo import read_named_bundles
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.pair import LoadedPair
from dflash_trt.runtime import GeneratorOptions, Request, total
from dflash_trt.tuning.bundle_schedule import NONE

PLAIN = "target_only"


def accept(pair: LoadedPair, temperature: float, max_tokens: int) -> Figures:
    """Acceptance of the bundle's prompts."""
    results = pair.run(requests_of(pair.bundle, max_tokens, temperature))
    summary = total(one.statistics for one in results)
    return {
        "acceptance_length": summary.acceptance_length,
        "steps": summary.steps,
        "output_tokens": summary.output_tokens,
        "accepted_by_slot": list(summary.conditional_acceptance),
    }


def describe(bundle: Bundle) -> Figures:
    """A draft's kind and size."""
    files = [one for one in bundle.manifest.files if one.path.startswith("weights/draft/")]
    draft = bundle.manifest.draft
    weights = sum(one.bytes for one in files if one.path.endswith(".safetensors"))
    return {"kind": draft.kind, "parameters": draft.parameters, "bytes": weights}


@bench(runs=3)
def measure(
    work: Work,
    *,
    draft: Annotated[tuple[str, ...], "NAME=BUNDLE; repeatable."] = (),
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16),
    block: Annotated[tuple[int, ...], "Rows of a verify step."] = (4, 8),
    max_tokens: int = 128,
    speed_tokens: Annotated[int, "Of an answer that is timed."] = 64,
    speed_temperature: Annotated[float, "Of answers that are timed."] = 0.0,
    least_requests: int = 16,
) -> Figures:
    opened = read_named_bundles(draft, None)
    if not opened:
        raise DflashError("is missing", where="--draft", usage=True)
    pairs = {
        name: LoadedPair(one, threads=1, block_schedule=NONE, graphs=GRAPH_NAMES)
        for name, one in opened.items()
    }
    kinds: Figures = {}
    for name, pair in pairs.items():
        greedy, drawn = (accept(pair, heat, max_tokens) for heat in (0.0, 1.0))
        kinds[name] = {**describe(pair.bundle), "greedy": greedy, "temperature_1": drawn}
        click.echo(
            f"{name}: {kinds[name]['parameters']:,} parameters, tau "
            f"{greedy['acceptance_length']:.2f} greedy, {drawn['acceptance_length']:.2f} at T 1"
        )
    first = next(iter(pairs.values()))
    requests = requests_of(first.bundle, speed_tokens, speed_temperature)
    ways = {PLAIN: (first, GeneratorOptions(speculation=False))}
    ways |= {
        f"{name}, block {rows}": (pair, GeneratorOptions(block_size=rows))
        for name, pair in pairs.items()
        for rows in block
    }
    by_concurrency = {
        str(level): _compare(ways, requests, level, least_requests, work.runs)
        for level in concurrency
    }
    return {"drafts": kinds, "by_concurrency": by_concurrency}


def _compare(
    ways: dict[str, tuple[LoadedPair, GeneratorOptions]],
    requests: Sequence[Request],
    level: int,
    least: int,
    runs: int,
) -> Figures:
    queue = list(islice(cycle(requests), max(least, 2 * level)))

    def run(pair: LoadedPair, way: GeneratorOptions) -> float:
        generator = pair.make_generator(way)
        started = time.process_time()
        tokens = decode_all(generator, queue, level)
        return tokens / (time.process_time() - started)

    for pair, way in ways.values():
        decode_all(pair.make_generator(way), queue[:level], level)  # warms up
    turns = {name: partial(run, *one) for name, one in ways.items()}
    found = take_turns(turns, runs, rotate=True)
    figures = {
        name: {
            "tokens_per_cpu_second": spread(rates),
            "to_target_only": spread_of_ratios(rates, found[PLAIN]),
        }
        for name, rates in found.items()
    }
    plain = median(found[PLAIN])
    parts = [
        f"{name} {show(one['to_target_only'], '.2f')}"
        for name, one in figures.items()
        if name != PLAIN
    ]
    click.echo(f"concurrency {level}: {PLAIN} {plain:,.0f} tokens/s; × {', × '.join(parts)}")
    return figures

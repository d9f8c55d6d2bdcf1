"""What serving costs: tokens/s through gRPC streaming against the same work in this process.

Runs of the two are interleaved and each ratio is between neighbours. At N clients, N requests are
in flight all the time: in-process the generator holds them, over gRPC each of N streams of the load
generator sends one after another.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from itertools import count as numbers
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.bundles import decode_all, prompt_file, requests_of
from dflash_perf.bench.repeat import show, spread, spread_of_ratios, take_turns
from dflash_perf.bench.served import serve, sweep_once
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.pair import LoadedPair
from dflash_trt.runtime import Generator, Request
from dflash_trt.serving.server.repository import RepositoryOptions
from dflash_trt.tuning.bundle_schedule import NONE


@dataclass(frozen=True, slots=True)
class Rate:
    """Output tokens/s of one run; `host_us` is the generator's host time in µs per token."""

    tokens_per_second: float
    host_us: float = 0.0


def run_in_process(generator: Generator, requests: list[Request], clients: int) -> Rate:
    """Decodes `requests` with `clients` of them in flight."""
    host = generator.step_seconds - generator.executor_seconds
    started = time.perf_counter()
    tokens = decode_all(generator, requests, clients)
    seconds = time.perf_counter() - started
    host = generator.step_seconds - generator.executor_seconds - host
    return Rate(tokens / seconds, host / tokens * 1e6)


@bench(runs=5)
def measure(
    work: Work,
    bundle: Path,
    *,
    clients: tuple[int, ...] = (1, 8, 32),
    requests: Annotated[int, "Requests of a run."] = 64,
    max_tokens: int = 128,
) -> Figures:
    opened = open_bundle(bundle)
    # The runner of a server, so that detokenising is part of the work.
    generator = LoadedPair(opened, block_schedule=NONE).open_runner().generator
    prompts, folders = prompt_file(opened), numbers()
    queue = list(islice(cycle(requests_of(opened, max_tokens)), requests))

    def run_served(address: str, streams: int) -> Rate:
        results = work.folder / f"sweep-{next(folders)}"
        served = {"name": "served", "url": address}
        load = {"request_count": requests, "osl": max_tokens, "warmup": 0}
        (run,) = sweep_once(results, served, prompts, streams, **load).runs()
        return Rate(run.values["output_throughput"])

    by_clients: Figures = {}
    options = RepositoryOptions(block_schedule=NONE)
    with serve(bundle, work.folder / "repository", options) as address:
        for streams in clients:
            ways = {
                "alone": partial(run_in_process, generator, queue, streams),
                "served": partial(run_served, address, streams),
            }
            take_turns(ways, 1)  # warms both up
            rates = take_turns(ways, work.runs)
            by_clients[str(streams)] = _summarize(streams, rates["alone"], rates["served"])
    return {"pair": opened.manifest.name, "by_clients": by_clients}


def _summarize(clients: int, alone: list[Rate], served: list[Rate]) -> Figures:
    inside, outside = ([run.tokens_per_second for run in runs] for runs in (alone, served))
    ratio = spread_of_ratios(outside, inside)
    added = spread([1e6 / out - 1e6 / own for own, out in zip(inside, outside, strict=True)])
    click.echo(
        f"{clients} clients: served / in-process {show(ratio, '.3f')}, "
        f"{added['median']:.0f} µs a token added"
    )
    return {
        "ratio": ratio,
        "served_tokens_per_second": spread(outside),
        "in_process_tokens_per_second": spread(inside),
        "in_process_host_us_per_token": spread([run.host_us for run in alone]),
        "added_us_per_token": added,
    }

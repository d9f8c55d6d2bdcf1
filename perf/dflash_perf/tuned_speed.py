"""A tuned bundle against the best fixed choice, by concurrency: is it ever slower?

    dflash-trt build --target demo --max-batch 32 -o BUNDLE && dflash-trt tune BUNDLE
    python -m dflash_perf.tuned_speed BUNDLE --output perf/results

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
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import click

from dflash_perf.record import spread, write_record
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.bundle.tokenizer import load_tokenizer
from dflash_trt.errors import DflashError
from dflash_trt.executors import open_executor
from dflash_trt.executors.base import Executor
from dflash_trt.runtime import Engine, EngineOptions, Request, SamplingParams
from dflash_trt.runtime.bundle_schedule import AUTO, choose_schedule
from dflash_trt.runtime.prompts import read_prompts

TUNED, PLAIN = "tuned", "target_only"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def run_closed_loop(
    executor: Executor,
    requests: list[Request],
    concurrency: int,
    options: EngineOptions,
    eos: list[int],
    clock: Callable[[], float],
) -> tuple[float, int]:
    """Decodes `requests`, `concurrency` at a time: output tokens/s, and how many tokens."""
    engine = Engine(executor, eos_token_ids=eos, options=options)
    waiting = deque(requests)
    tokens = live = 0
    started = clock()
    while waiting or live:
        while waiting and live < concurrency:
            engine.submit(waiting.popleft())
            live += 1
        for event in engine.step():
            tokens += len(event.token_ids)
            live -= event.result is not None
    return tokens / (clock() - started), tokens


def summarize(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Figures of one concurrency from tokens/s by way, the runs in their order."""
    others = {name: median(values) for name, values in rates.items() if name != TUNED}
    best = max(others, key=others.__getitem__)
    ratios = [tuned / other for tuned, other in zip(rates[TUNED], rates[best], strict=True)]
    return {
        "tuned_to_best": median(rates[TUNED]) / others[best],
        "best": best,
        "run_by_run": spread(ratios),
        "tokens_per_second": {name: spread(values) for name, values in rates.items()},
    }


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--concurrency",
    "levels",
    multiple=True,
    type=click.IntRange(1),
    default=(1, 2, 4, 8, 16, 32),
    show_default=True,
)
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True)
@click.option("--least-requests", type=click.IntRange(1), default=16, show_default=True)
@click.option("--max-tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option(
    "--prompt-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Other prompts than the bundle's, for example such that drafts are poor for.",
)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--clock", type=click.Choice(list(CLOCKS)), default="wall", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Folder to record the run in.")
def main(
    bundle: Path,
    levels: tuple[int, ...],
    runs: int,
    least_requests: int,
    max_tokens: int,
    temperature: float,
    prompt_file: Path | None,
    threads: int,
    clock: str,
    output: Path | None,
) -> None:
    """Compare a tuned BUNDLE with target_only and with every fixed block."""
    if clock == "cpu" and threads > 1:
        raise click.UsageError("--clock cpu is for one thread")
    opened = open_bundle(bundle)
    limits = opened.manifest.limits
    schedule = choose_schedule(opened, AUTO)
    if schedule is None or schedule.measured is None:
        raise DflashError("has no schedule", where=bundle, fix="`dflash-trt tune` it", usage=True)
    prompts = prompt_file or opened.prompts
    if prompts is None:
        raise click.UsageError("the bundle came without prompts")
    if max(levels) > limits.max_batch:
        raise click.UsageError(f"the bundle holds {limits.max_batch} sequences")
    tokenizer = load_tokenizer(opened)
    requests = [
        Request(
            prompt_ids=tuple(tokenizer.encode(text)),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=temperature, seed=seed),
        )
        for seed, text in enumerate(read_prompts(prompts))
    ]
    chunk = limits.prefill_chunk
    ways = {
        TUNED: EngineOptions(schedule=schedule, prefill_chunk=chunk),
        PLAIN: EngineOptions(speculation=False, prefill_chunk=chunk),
    }
    for block in schedule.measured.block_sizes:
        ways[f"block {block}"] = EngineOptions(block_size=block, prefill_chunk=chunk)
    executor = open_executor(opened, threads=threads, graphs=("target", "draft", "target_only"))
    click.echo(f"schedule: {schedule.describe()}")
    figures: dict[str, Any] = {}
    for level in levels:
        work = list(islice(cycle(requests), max(least_requests, 2 * level)))
        rates: dict[str, list[float]] = {name: [] for name in ways}
        counts: set[int] = set()
        order = deque(ways)
        run_closed_loop(executor, work[:level], level, ways[TUNED], [], CLOCKS[clock])  # warm up
        for _ in range(runs):
            for name in order:
                rate, tokens = run_closed_loop(
                    executor,
                    work,
                    level,
                    ways[name],
                    opened.manifest.target.eos_token_ids,
                    CLOCKS[clock],
                )
                rates[name].append(rate)
                counts.add(tokens)
            order.rotate(1)
        if executor.is_bitwise and len(counts) > 1:
            raise AssertionError(f"ways of decoding differ in their outputs: {counts} tokens")
        figures[str(level)] = summarize(rates)
        _show(level, figures[str(level)])
    worst = min(row["tuned_to_best"] for row in figures.values())
    click.echo(f"worst: {worst:.3f} of the best fixed choice")
    if output is not None:
        settings = {
            "prompts": len(requests),
            "least_requests": least_requests,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "threads": threads,
            "clock": clock,
        }
        record = {
            "pair": opened.manifest.name,
            "settings": settings,
            "schedule": [entry.model_dump() for entry in schedule.blocks],
            "fallback": schedule.fallback,
            "worst_tuned_to_best": worst,
            "by_concurrency": figures,
        }
        click.echo(write_record(output, "tuned-speed", "dflash_perf.tuned_speed", record))


def _show(level: int, figures: dict[str, Any]) -> None:
    around, best = figures["run_by_run"], figures["best"]
    rates = {name: row["median"] for name, row in figures["tokens_per_second"].items()}
    click.echo(
        f"concurrency {level}: tuned / best fixed {figures['tuned_to_best']:.3f} "
        f"({around['min']:.2f} … {around['max']:.2f}, {around['runs']} interleaved runs); "
        f"tuned {rates[TUNED]:,.0f}, {best} {rates[best]:,.0f}, "
        f"target_only {rates[PLAIN]:,.0f} tokens/s"
    )


if __name__ == "__main__":
    main()

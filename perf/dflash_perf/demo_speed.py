"""DFlash against target_only on a bundle, by batch: tokens/s, acceptance, host time.

    python -m dflash_perf.demo_speed BUNDLE --output perf/results

Every run decodes the bundle's prompts, as many at once as the batch says, for at least
`--seconds`; runs of the two are interleaved and each ratio is between neighbours.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dflash_perf.record import spread, write_record
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.bundle.tokenizer import load_tokenizer
from dflash_trt.executors import open_executor
from dflash_trt.executors.base import Executor
from dflash_trt.runtime import Engine, EngineOptions, Request, SamplingParams, total
from dflash_trt.runtime.prompts import read_prompts
from dflash_trt.runtime.statistics import RequestStatistics


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run.

    `tokens_per_second` is all decode tokens over the time of the steps that made them:
    tokens after each request's first / (wall time - prefill time) at batch 1, and output
    tokens / wall time of the whole run above batch 1, where prefill and decode overlap.
    """

    tokens_per_second: float
    acceptance_length: float | None
    host_ms_per_step: float
    executor_ms_per_step: float


def measure(
    executor: Executor,
    requests: list[Request],
    *,
    speculation: bool,
    block_size: int | None,
    eos: list[int],
    batch: int,
    seconds: float,
) -> Run:
    """Decodes `requests` in groups of `batch`, again and again until `seconds` have passed."""
    options = EngineOptions(speculation=speculation, block_size=block_size)
    engine = Engine(executor, eos_token_ids=eos, options=options)
    statistics: list[RequestStatistics] = []
    steps = 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        for first in range(0, len(requests), batch):
            results = engine.generate(requests[first : first + batch])
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
    return Run(
        tokens_per_second=rate,
        acceptance_length=summary.acceptance_length,
        host_ms_per_step=(engine.step_seconds - engine.executor_seconds) / steps * 1e3,
        executor_ms_per_step=engine.executor_seconds / steps * 1e3,
    )


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 4, 8), show_default=True)
@click.option("--block-size", type=int, help="Default: the bundle's.")
@click.option("--runs", type=click.IntRange(1), default=7, show_default=True)
@click.option("--seconds", type=float, default=2.0, show_default=True, help="Least time of a run.")
@click.option("--max-tokens", type=int, default=256, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--threads", type=int, default=1, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Folder to record the run in.")
def main(
    bundle: Path,
    batches: tuple[int, ...],
    block_size: int | None,
    runs: int,
    seconds: float,
    max_tokens: int,
    temperature: float,
    threads: int,
    output: Path | None,
) -> None:
    """Measure DFlash against target_only on BUNDLE's own prompts."""
    opened = open_bundle(bundle)
    manifest = opened.manifest
    if opened.prompts is None:
        raise click.UsageError("the bundle came without prompts")
    tokenizer = load_tokenizer(opened)
    requests = [
        Request(
            prompt_ids=tuple(tokenizer.encode(text)),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=temperature, seed=seed),
        )
        for seed, text in enumerate(read_prompts(opened.prompts))
    ]
    executor = open_executor(opened, threads=threads, graphs=("target", "draft", "target_only"))
    figures: dict[str, Any] = {}
    for batch in batches:
        pairs: list[tuple[Run, Run]] = []
        for _ in range(runs):
            plain, dflash = (
                measure(
                    executor,
                    requests,
                    speculation=speculation,
                    block_size=block_size if speculation else None,
                    eos=manifest.target.eos_token_ids,
                    batch=batch,
                    seconds=seconds,
                )
                for speculation in (False, True)
            )
            pairs.append((plain, dflash))
        figures[str(batch)] = _summarize(pairs)
        _show(batch, figures[str(batch)])
    if output is not None:
        settings = {
            "block_size": block_size or manifest.limits.block_size,
            "prompts": len(requests),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "threads": threads,
            "seconds_per_run": seconds,
        }
        record = {"pair": manifest.name, "settings": settings, "by_batch": figures}
        click.echo(write_record(output, "demo-speed", "dflash_perf.demo_speed", record))


def _summarize(pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    plain, dflash = zip(*pairs, strict=True)
    return {
        "ratio": spread([d.tokens_per_second / p.tokens_per_second for p, d in pairs]),
        "target_only_tokens_per_second": spread([run.tokens_per_second for run in plain]),
        "dflash_tokens_per_second": spread([run.tokens_per_second for run in dflash]),
        "acceptance_length": dflash[-1].acceptance_length,
        "target_only_executor_ms_per_step": spread([run.executor_ms_per_step for run in plain]),
        "target_only_host_ms_per_step": spread([run.host_ms_per_step for run in plain]),
        "dflash_executor_ms_per_step": spread([run.executor_ms_per_step for run in dflash]),
        "dflash_host_ms_per_step": spread([run.host_ms_per_step for run in dflash]),
    }


def _show(batch: int, figures: dict[str, Any]) -> None:
    ratio = figures["ratio"]
    click.echo(
        f"batch {batch}: DFlash / target_only {ratio['median']:.2f} "
        f"({ratio['min']:.2f} … {ratio['max']:.2f}, {ratio['runs']} interleaved runs), "
        f"{figures['dflash_tokens_per_second']['median']:,.0f} and "
        f"{figures['target_only_tokens_per_second']['median']:,.0f} tokens/s, "
        f"acceptance length {figures['acceptance_length']:.2f}; host "
        f"{figures['dflash_host_ms_per_step']['median']:.3f} of "
        f"{figures['dflash_executor_ms_per_step']['median']:.2f} ms a step"
    )


if __name__ == "__main__":
    main()

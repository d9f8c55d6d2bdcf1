"""`dflash-trt generate`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.bundle.tokenizer import load_tokenizer
from dflash_trt.commands.options import (
    bundle_argument,
    encode_prompts,
    json_option,
    prompt_options,
    sampling_options,
    threads_option,
)
from dflash_trt.errors import DflashError
from dflash_trt.executors import check_runnable, open_executor
from dflash_trt.runtime import (
    Engine,
    EngineOptions,
    Request,
    RequestResult,
    SamplingParams,
    TokenEvent,
    TotalStatistics,
    total,
)


@click.command("generate", short_help="Continue prompts, with or without speculation.")
@bundle_argument
@prompt_options
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True)
@sampling_options
@click.option("--stop", "stops", multiple=True, help="Text that ends the output; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-sequence token.")
@click.option("--block-size", type=click.IntRange(2), help="Rows of a verify step.")
@click.option("--no-speculation", is_flag=True, help="Plain decoding, with the baseline graph.")
@click.option(
    "--view", is_flag=True, help="Colour accepted drafts (green) and the target's own (yellow)."
)
@threads_option
@json_option
def command(
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    raw: bool,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int,
    stops: tuple[str, ...],
    ignore_eos: bool,
    block_size: int | None,
    no_speculation: bool,
    view: bool,
    threads: int,
    as_json: bool,
) -> None:
    """Continue prompts with the pair in BUNDLE.

    Text streams to stdout, statistics go to stderr. Several prompts run together and are
    printed in order. A prompt is a user's message where the tokenizer has a chat template.
    """
    if view and as_json:
        raise DflashError("--view and --json exclude each other", usage=True)
    if no_speculation and block_size is not None:
        raise DflashError("--block-size needs speculation; drop --no-speculation", usage=True)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    opened = open_bundle(bundle)
    check_runnable(opened)
    tokenizer = load_tokenizer(opened)
    manifest = opened.manifest
    requests = [
        Request(
            prompt_ids=tuple(ids),
            max_tokens=max_tokens,
            sampling=sampling,
            stop_strings=stops,
            ignore_eos=ignore_eos,
        )
        for ids in encode_prompts(tokenizer, prompt, prompt_file, None, raw=raw)
    ]
    executor = open_executor(
        opened,
        threads=threads,
        graphs=("target_only",) if no_speculation else ("target", "draft"),
    )
    engine = Engine(
        executor,
        tokenizer=tokenizer.core,
        eos_token_ids=manifest.target.eos_token_ids,
        options=EngineOptions(
            speculation=not no_speculation,
            block_size=block_size,
            prefill_chunk=manifest.limits.prefill_chunk,
        ),
    )
    for number, request in enumerate(requests, start=1):
        _check(engine, request, None if len(requests) == 1 else number)
    writer = _Writer(view=view, quiet=as_json, count=len(requests))
    started = time.perf_counter()
    results = engine.generate(requests, writer.take)
    summary = total((result.statistics for result in results), time.perf_counter() - started)
    executor.close()
    if as_json:
        _print_json(results, summary)
    else:
        click.echo()
        _print_statistics(results, summary)


def _check(engine: Engine, request: Request, number: int | None) -> None:
    """Raises DflashError for a request that cannot run, naming its prompt among several."""
    try:
        engine.check(request)
    except DflashError as error:
        where = error.where if number is None else f"{error.where} {number}"
        raise DflashError(error.what, where=where, fix=error.fix, usage=error.usage) from error


class _Writer:
    """Prints texts in the prompts' order while they all grow at once."""

    def __init__(self, *, view: bool, quiet: bool, count: int) -> None:
        self._view = view
        self._quiet = quiet
        self._count = count
        self._waiting: dict[int, list[str]] = {}
        self._finished: set[int] = set()
        self._current = 0
        self._began = False

    def take(self, index: int, event: TokenEvent) -> None:
        """Prints or keeps what an event of prompt `index` made visible."""
        if self._quiet:
            return
        self._waiting.setdefault(index, []).append(self._paint(event))
        if event.finish_reason is not None:
            self._finished.add(index)
        while self._current < self._count:
            self._begin()
            text = "".join(self._waiting.pop(self._current, []))
            # With --view the colours must survive a pipe: they are what was asked for.
            click.echo(text, nl=False, color=True if self._view else None)
            if self._current not in self._finished:
                return
            self._current += 1
            self._began = False

    def _begin(self) -> None:
        if self._count > 1 and not self._began:
            lead = "" if self._current == 0 else "\n"
            click.secho(f"{lead}--- prompt {self._current + 1}", dim=True)
        self._began = True

    def _paint(self, event: TokenEvent) -> str:
        if not self._view:
            return event.text
        if not event.pieces:
            return event.text
        return "".join(
            click.style(piece, fg="green" if index < event.accepted_tokens else "yellow")
            for index, piece in enumerate(event.pieces)
        )


def _print_json(results: list[RequestResult], summary: TotalStatistics) -> None:
    described: list[dict[str, Any]] = [
        {
            "text": result.text,
            "token_ids": list(result.token_ids),
            **result.statistics.to_json(),
            "finish_reason": result.finish_reason,
        }
        for result in results
    ]
    if len(described) == 1:
        click.echo(json.dumps(described[0], indent=2))
    else:
        click.echo(json.dumps({"requests": described, "total": summary.to_json()}, indent=2))


def _print_statistics(results: list[RequestResult], summary: TotalStatistics) -> None:
    reasons = {result.finish_reason for result in results}
    lines = [
        f"{summary.output_tokens} tokens from {summary.prompt_tokens} of prompt, "
        f"{summary.steps} steps, ended by {' and '.join(sorted(reasons))}"
    ]
    if summary.acceptance_length is not None and summary.acceptance_rate is not None:
        histogram = " ".join(
            f"{emitted}:{count}"
            for emitted, count in enumerate(summary.acceptance_histogram, start=1)
        )
        lines.append(
            f"acceptance length {summary.acceptance_length:.2f} "
            f"({summary.acceptance_rate:.0%} of {summary.drafted_tokens} drafts); "
            f"tokens per step {histogram}"
        )
    if summary.interactivity is not None and summary.median_time_to_first_token_s is not None:
        lines.append(
            f"time to first token {summary.median_time_to_first_token_s * 1e3:.1f} ms, then "
            f"{summary.interactivity:,.0f} tokens/s per request"
        )
    if summary.requests > 1 and summary.output_throughput is not None:
        lines.append(
            f"{summary.requests} requests, {summary.output_throughput:,.0f} tokens/s together"
        )
    for line in lines:
        click.secho(line, err=True, dim=True)

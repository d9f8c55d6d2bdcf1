"""What `verify` shows: of the proof, of named sets of prompts, beside a twin."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median

import click

from dflash_trt.cli.options import print_json
from dflash_trt.core.text_table import columns
from dflash_trt.decoding.loops import LOOP_TIMES, LOOP_TOKENS
from dflash_trt.proof.comparison import TwinComparison
from dflash_trt.proof.task_table import TaskFigures
from dflash_trt.proof.verification import ModeReport, Speed

_NONE = "–"


def print_report(
    reports: list[ModeReport], speed: Speed, prompts: int, timed: str, threads: str
) -> None:
    click.echo(f"{prompts} prompts against target_only, batch 1:")
    for report in reports:
        line = f"  {report.mode:<28} {_outcome(report)}: {report.tokens:,} tokens, "
        line += f"{report.logits:,} logits"
        if report.statistics.acceptance_length is not None:
            line += f"; acceptance length {report.statistics.acceptance_length:.2f}"
        click.echo(line)
    for report in reports:
        for tie in [] if report.is_bitwise else report.ties:
            click.echo(
                f"{report.mode}: prompt {tie.prompt} parts at output token {tie.position}, "
                f"logit gap {tie.gap:.3g}, measured noise {report.noise:.3g}"
            )
        if not report.is_lossless:
            click.echo(f"first difference, {report.difference}")
    if speed.ratios:
        ratios = sorted(speed.ratios)
        click.echo(
            f"speed at batch 1, {len(ratios)} interleaved runs{threads}: target_only "
            f"{median(speed.baseline):,.0f} tokens/s, {timed} "
            f"{median(speed.speculative):,.0f}, ratio {speed.speedup:.2f} "
            f"({ratios[0]:.2f} … {ratios[-1]:.2f})"
        )


def _outcome(report: ModeReport) -> str:
    if report.difference is None:
        return "identical"
    if not report.is_lossless:
        return "DIFFERENT"
    return f"equal up to {len(report.ties)} floating-point ties"


def print_report_json(
    reports: list[ModeReport], speed: Speed, figures: list[TaskFigures], failed: bool
) -> None:
    modes = [
        {
            "mode": report.mode,
            "identical": report.difference is None,
            "lossless": report.is_lossless,
            "ties": [dataclasses.asdict(tie) for tie in report.ties],
            "noise": report.noise,
            "tokens": report.tokens,
            "logits": report.logits,
            "difference": report.difference and dataclasses.asdict(report.difference),
            "statistics": report.statistics.to_json(),
        }
        for report in reports
    ]
    timing = {
        "target_only_tokens_per_second": list(speed.baseline),
        "dflash_tokens_per_second": list(speed.speculative),
        "speedup": speed.speedup if speed.ratios else None,
    }
    sets = [one.to_json() for one in figures]
    print_json({"lossless": not failed, "modes": modes, "speed": timing, "sets": sets})


def print_tasks(figures: Sequence[TaskFigures], mode: str, drafter: str = "DFlash") -> None:
    """A line per set, then what is not in them; `mode` is the one that was measured."""
    header = ("set", "prompts", "output tokens", "steps", "τ", "target_only", drafter, "speed-up")
    click.echo(
        f"by set of prompts, {mode} (τ = output tokens after the first ÷ steps; tokens/s at "
        "batch 1):"
    )
    rows: list[tuple[str, ...]] = [header]
    for one in figures:
        statistics, speed = one.statistics, one.speed
        rates: tuple[str, ...] = (_NONE, _NONE, _NONE)
        if speed.ratios:
            baseline, speculative = median(speed.baseline), median(speed.speculative)
            rates = _rate(baseline), _rate(speculative), f"{speed.speedup:.2f}"
        counts = (statistics.requests, statistics.output_tokens, statistics.steps)
        tau = _tau(statistics.acceptance_length)
        rows.append((one.name, *(f"{count:,}" for count in counts), tau, *rates))
    for line in columns(rows):
        click.echo(f"  {line}")
    with_loops = [one for one in figures if one.looping.requests]
    if len(with_loops) == 2 and len(figures) > 2:
        with_loops.pop()  # one set has all the loops there are
    for one in with_loops:
        click.echo(
            f"looping: {count_answers(one.looping.requests)} of {one.name}, "
            f"τ {_tau(one.looping.acceptance_length)}, not in the figures (the same "
            f"{LOOP_TOKENS} tokens {LOOP_TIMES} times or more)"
        )


def count_answers(count: int) -> str:
    """How many answers, in words."""
    return f"{count:,} answer{'' if count == 1 else 's'}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _tau(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def print_comparison(comparison: TwinComparison, failures: Sequence[str]) -> None:
    text = comparison.text
    change = text.perplexity / text.twin_perplexity - 1
    click.echo(f"{text.tokens:,} predicted tokens, bundle beside its twin:")
    click.echo(f"  same likeliest token  {text.agreement:.2%}")
    click.echo(
        f"  KL(twin ‖ bundle)     {text.mean_kl:.3g} nats a token, at most {text.max_kl:.3g}"
    )
    click.echo(
        f"  perplexity            {text.perplexity:.4f}, twin {text.twin_perplexity:.4f} "
        f"({change:+.2%})"
    )
    for temperature in sorted({one.temperature for one in comparison.acceptances}):
        name = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        rows = [("target", "draft", "length", "loss", "steps", "tokens")]
        for one in comparison.acceptances:
            if one.temperature != temperature:
                continue
            statistics, loss = one.statistics, one.loss
            length = statistics.acceptance_length
            cells = "-" if length is None else f"{length:.3f}"
            lost = "-" if length is None or loss is None else f"{loss:.1f}%"
            counts = f"{statistics.steps:,}", f"{statistics.step_tokens:,}"
            rows.append((one.target, one.draft, cells, lost, *counts))
        click.echo(f"acceptance length over {statistics.requests} prompts, {name}:")
        for line in columns(rows, words=2):
            click.echo(f"  {line}")
    for failure in failures:
        click.echo(f"FAILED: {failure}")


def print_comparison_json(comparison: TwinComparison, failures: Sequence[str]) -> None:
    acceptances = [
        {
            "target": one.target,
            "draft": one.draft,
            "temperature": one.temperature,
            "loss_percent": one.loss,
            "tokens": one.statistics.step_tokens,
            "statistics": one.statistics.to_json(),
        }
        for one in comparison.acceptances
    ]
    text = dataclasses.asdict(comparison.text)
    print_json({"text": text, "acceptance": acceptances, "failures": failures})

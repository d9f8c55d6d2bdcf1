"""How commands show figures by named set of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import click

from dflash_trt.proof.task_table import TaskFigures
from dflash_trt.runtime.loops import LOOP_TIMES, LOOP_TOKENS

_NONE = "–"
_HEADER = ("prompts", "output tokens", "steps", "τ", "target_only")


def print_tasks(figures: Sequence[TaskFigures], mode: str, drafter: str = "DFlash") -> None:
    """A line per set, then what is not in them; `mode` is the one that was measured."""
    header = (*_HEADER, drafter, "speed-up")
    width = max(len("set"), *(len(one.name) for one in figures))
    click.echo(
        f"by set of prompts, {mode} (τ = output tokens after the first ÷ steps; tokens/s at "
        "batch 1):"
    )
    click.echo(f"  {'set':<{width}}" + "".join(f"  {title:>{_width(title)}}" for title in header))
    for one in figures:
        cells = zip(_cells(one), header, strict=True)
        line = "".join(f"  {cell:>{_width(title)}}" for cell, title in cells)
        click.echo(f"  {one.name:<{width}}{line}")
    for note in loop_notes(figures):
        click.echo(note)


def loop_notes(figures: Sequence[TaskFigures]) -> list[str]:
    """Which answers are left out of the figures, a sentence for each set; that of all at the end.

    With several sets, the last of `figures` is all of them together.
    """
    with_loops = [one for one in figures if one.looping.requests]
    if len(with_loops) == 2 and len(figures) > 2:
        with_loops.pop()  # one set has all the loops there are
    return [
        f"looping: {count_answers(one.looping.requests)} of {one.name}, "
        f"τ {_tau(one.looping.acceptance_length)}, not in the figures (the same "
        f"{LOOP_TOKENS} tokens {LOOP_TIMES} times or more)"
        for one in with_loops
    ]


def count_answers(count: int) -> str:
    """How many answers, in words."""
    return f"{count:,} answer{'' if count == 1 else 's'}"


def _cells(one: TaskFigures) -> tuple[str, ...]:
    statistics, speed = one.statistics, one.speed
    rates: tuple[str, ...] = (_NONE, _NONE, _NONE)
    if speed.ratios:
        baseline, speculative = median(speed.baseline), median(speed.speculative)
        rates = _rate(baseline), _rate(speculative), f"{speed.speedup:.2f}"
    return (
        f"{statistics.requests:,}",
        f"{statistics.output_tokens:,}",
        f"{statistics.steps:,}",
        _tau(statistics.acceptance_length),
        *rates,
    )


def _width(title: str) -> int:
    return max(len(title), 6)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _tau(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"

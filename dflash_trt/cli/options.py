"""Options that several commands share, and what they turn into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dflash_trt.errors import DflashError
from dflash_trt.speculation.schedule import BlockSchedule
from dflash_trt.tuning.bundle_schedule import note_threads

F = TypeVar("F", bound=Callable[..., Any])

bundle_argument = click.argument("bundle", type=click.Path(file_okay=False, path_type=Path))
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
threads_option = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="CPU threads per step.",
)


block_schedule_option = click.option(
    "--block-schedule",
    metavar="auto|none|FILE",
    default="auto",
    show_default=True,
    help="Block size by batch: the bundle's own from `tune`, none, or that in a file.",
)


def sampling_options(function: F) -> F:
    """--temperature, --top-k, --top-p, --seed."""
    for option in (
        click.option("--seed", type=int, default=0, show_default=True, help="Sampling seed."),
        click.option("--top-p", type=float, default=1.0, show_default=True, help="Nucleus mass."),
        click.option("--top-k", type=int, help="Sample from the k likeliest tokens."),
        click.option(
            "--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."
        ),
    ):
        function = option(function)
    return function


def prompt_options(function: F) -> F:
    """--prompt, --prompt-file, --raw."""
    for option in (
        click.option("--raw", is_flag=True, help="Do not apply the chat template."),
        click.option(
            "--prompt-file",
            type=click.Path(dir_okay=False, path_type=Path),
            help='One prompt (the whole file), or many (.jsonl with a "prompt" each).',
        ),
        click.option("--prompt", help="The prompt's text."),
    ):
        function = option(function)
    return function


def parse_counts(
    text: str | None, option: str, low: int, high: int, default: list[int]
) -> list[int]:
    """Integers of a comma-separated list, each within low … high; `default` for None."""
    if text is None:
        return default
    counts: list[int] = []
    for item in text.split(","):
        if not item.strip().isdecimal() or not low <= int(item) <= high:
            raise DflashError(
                f"{item.strip()!r} is not a whole number from {low} to {high}",
                where=option,
                usage=True,
            )
        counts.append(int(item))
    return sorted(set(counts))


def parse_numbers(text: str, option: str) -> list[float]:
    """Numbers above 0 of a comma-separated list, in its order."""
    numbers: list[float] = []
    for item in text.split(","):
        try:
            number = float(item)
        except ValueError:
            number = 0.0
        if not 0 < number < 1e9:
            raise DflashError(f"{item.strip()!r} is not a number above 0", where=option, usage=True)
        numbers.append(number)
    return numbers


def show_thread_note(schedule: BlockSchedule | None, threads: int) -> None:
    """Says on stderr when a schedule was measured with another number of CPU threads."""
    note = note_threads(schedule, threads)
    if note is not None:
        click.echo(f"note: {note}", err=True)

"""Options that several commands share, and what they turn into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dflash_trt.checkpoints.target import TargetSpec
from dflash_trt.errors import DflashError
from dflash_trt.speculation.schedule import BlockSchedule
from dflash_trt.text.prompts import read_prompts
from dflash_trt.text.tokenizer import BundleTokenizer
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


def encode_prompts(
    tokenizer: BundleTokenizer,
    prompt: str | None,
    prompt_file: Path | None,
    default_file: Path | None,
    *,
    raw: bool,
) -> list[list[int]]:
    """Token ids of the prompts asked for, through the chat template where there is one.

    Raises:
        DflashError: both or neither given, an empty prompt, a file that cannot be used.
    """
    texts = read_texts(prompt, prompt_file, default_file)
    if tokenizer.chat_template is not None and not raw:
        return tokenizer.encode_chats(texts)
    return [tokenizer.encode(text) for text in texts]


def read_texts(
    prompt: str | None, prompt_file: Path | None, default_file: Path | None
) -> list[str]:
    """The prompts asked for, as text.

    Raises:
        DflashError: both or neither given, an empty prompt, a file that cannot be used.
    """
    if prompt is not None and prompt_file is not None:
        raise DflashError("give --prompt or --prompt-file, not both", usage=True)
    file = prompt_file or (default_file if prompt is None else None)
    if file is not None:
        texts = read_prompts(file)
    elif prompt is not None:
        texts = [prompt]
    else:
        raise DflashError("no prompt", fix="pass --prompt TEXT or --prompt-file FILE", usage=True)
    for number, text in enumerate(texts, start=1):
        problem = _find_problem(text)
        if problem is not None:
            raise DflashError(
                problem,
                where=f"{file}, prompt {number}" if file else "--prompt",
                usage=True,
            )
    return texts


def read_calibration(target: TargetSpec, file: Path) -> list[list[int]]:
    """Token ids of the texts in `file`, as the target's own tokenizer reads them.

    Raises:
        DflashError: the checkpoint has no tokenizer, or a file that cannot be used.
    """
    folder = target.checkpoint.path
    if not (folder / "tokenizer.json").is_file():
        raise DflashError(
            "has no tokenizer.json, which calibration texts need",
            where=folder,
            fix="download the checkpoint's tokenizer",
        )
    return encode_prompts(BundleTokenizer(folder), None, file, None, raw=False)


def _find_problem(text: str) -> str | None:
    if not text:
        return "the prompt is empty; give it some text"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # A lone surrogate: bytes on the command line that are not UTF-8, or JSON's \ud800.
        return f"is not Unicode text at character {error.start}"
    return None

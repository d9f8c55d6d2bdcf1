"""Shared by all benchmarks: how one is declared, its options, its folder and its record."""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from dflash_perf.record import plain_argument, write_record

Figures = dict[str, Any]
"""The result of a benchmark, ready for JSON."""

_KINDS: dict[type, click.ParamType[Any]] = {
    int: click.IntRange(1),
    float: click.FloatRange(0),
    bool: click.BOOL,
    str: click.STRING,
    Path: click.Path(path_type=Path),
}


@dataclass(frozen=True, slots=True)
class Work:
    """A run of a benchmark: an empty folder for its files, and how often it measures."""

    folder: Path
    runs: int


Measure = TypeVar("Measure", bound=Callable[..., Figures | None])


BENCHES: dict[str, click.Command] = {}
"""The commands of the modules imported so far, by name."""


def bench(runs: int = 1) -> Callable[[Measure], Measure]:
    """Declares a function as a benchmark: a command with its module's name and docstring.

    The function takes a Work and its own options, prints its findings and returns the figures, or
    None if it writes its own files. Its signature declares the options: a positional parameter is
    an argument, and Annotated adds a help text. `runs` is the default of --runs.
    """

    def declare(measure: Measure) -> Measure:
        name = measure.__module__.rpartition(".")[2].replace("_", "-")
        BENCHES[name] = _to_command(name, measure, runs)
        return measure

    return declare


def _to_command(name: str, measure: Callable[..., Figures | None], runs: int) -> click.Command:
    hints = get_type_hints(measure, include_extras=True)
    _, *own = inspect.signature(measure).parameters.values()
    parameters = [_to_click(one, hints[one.name]) for one in own]
    folder = click.Path(file_okay=False, path_type=Path)
    often = partial(click.Option, ["--runs"], type=_KINDS[int], help="How often to measure.")
    parameters.append(often(default=runs, show_default=True))
    parameters.append(click.Option(["--scratch"], type=folder, help="Where to put its files."))
    if hints["return"] is not NoneType:
        parameters.append(click.Option(["--output"], type=folder, help="Folder to record it in."))

    def run(runs: int, scratch: Path | None, output: Path | None = None, **options: Any) -> None:
        with tempfile.TemporaryDirectory(dir=scratch) as files:
            figures = measure(Work(Path(files), runs), **options)
        if output is not None and figures is not None:
            plain = {key: _plain(one) for key, one in options.items()}
            record = {"options": {"runs": runs, **plain}, **figures}
            click.echo(write_record(output, name, click.get_current_context().obj, record))

    text = sys.modules[measure.__module__].__doc__
    return click.Command(name, params=parameters, callback=run, help=text)


def _plain(value: Any) -> Any:
    """An option's value in a record: paths by their last part alone."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Path):
        return value.name
    return plain_argument(value) if isinstance(value, str) else value


def _to_click(found: inspect.Parameter, kind: Any) -> click.Parameter:
    """The argument or option that sets a parameter of type `kind`."""
    kind, text = get_args(kind) if get_origin(kind) is Annotated else (kind, None)
    if get_origin(kind) is UnionType:  # X | None
        kind = get_args(kind)[0]
    is_many = get_origin(kind) is tuple
    kind = get_args(kind)[0] if is_many else kind
    is_choice = get_origin(kind) is Literal
    shown = click.Choice(get_args(kind)) if is_choice else _KINDS[kind]
    if found.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return click.Argument([found.name], type=shown, nargs=-1 if is_many else 1, required=True)
    option = partial(click.Option, [f"--{found.name.replace('_', '-')}"], help=text)
    if kind is bool:
        return option(is_flag=True)
    if found.default is inspect.Parameter.empty:
        return option(type=shown, required=True, multiple=is_many)
    return option(type=shown, default=found.default, show_default=True, multiple=is_many)

"""Shared by all benchmarks: how one is declared, its options, its folder and its record."""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
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
        hints = get_type_hints(measure, include_extras=True)
        _, *own = inspect.signature(measure).parameters.values()
        parameters = [_to_click(one, hints[one.name]) for one in own]
        folder = click.Path(file_okay=False, path_type=Path)
        many: dict[str, Any] = {"default": runs, "show_default": True}
        many["help"] = "How often to measure."
        parameters.append(click.Option(["--runs"], type=_KINDS[int], **many))
        parameters.append(click.Option(["--scratch"], type=folder, help="Where to put its files."))
        if hints["return"] is not NoneType:
            place = "Folder to record it in."
            parameters.append(click.Option(["--output"], type=folder, help=place))

        def run(
            runs: int, scratch: Path | None, output: Path | None = None, **options: Any
        ) -> None:
            with tempfile.TemporaryDirectory(dir=scratch) as files:
                figures = measure(Work(Path(files), runs), **options)
            if output is not None and figures is not None:
                record = {"options": {"runs": runs, **_plain(options)}, **figures}
                click.echo(write_record(output, name, click.get_current_context().obj, record))

        text = sys.modules[measure.__module__].__doc__
        BENCHES[name] = click.Command(name, params=parameters, callback=run, help=text)
        return measure

    return declare


def _plain(value: Any) -> Any:
    """Options in a record: paths by their last part alone."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return plain_argument(str(value)) if isinstance(value, str | Path) else value


def _to_click(found: inspect.Parameter, kind: Any) -> click.Parameter:
    """The argument or option that sets a parameter of type `kind`."""
    kind, text = get_args(kind) if get_origin(kind) is Annotated else (kind, None)
    if get_origin(kind) is UnionType:  # X | None
        kind = get_args(kind)[0]
    is_many = get_origin(kind) is tuple
    kind = get_args(kind)[0] if is_many else kind
    shown = click.Choice(get_args(kind)) if get_origin(kind) is Literal else _KINDS[kind]
    if found.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return click.Argument([found.name], type=shown, nargs=-1 if is_many else 1, required=True)
    name, more = f"--{found.name.replace('_', '-')}", dict[str, Any](help=text)
    if kind is bool:
        return click.Option([name], is_flag=True, **more)
    if found.default is inspect.Parameter.empty:
        return click.Option([name], type=shown, required=True, multiple=is_many, **more)
    more |= {"default": found.default, "show_default": True}
    return click.Option([name], type=shown, multiple=is_many, **more)

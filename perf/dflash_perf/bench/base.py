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


@dataclass(frozen=True, slots=True)
class Bench:
    """A benchmark. Its name is that of its module, its help the module's docstring.

    Args:
        measure: takes a Work and its own options, prints its findings and returns the figures, or
            None if it writes its own files. Its signature declares the options: a positional
            parameter is an argument, and Annotated adds a help text.
        runs: the default of --runs.
    """

    measure: Callable[..., Figures | None]
    runs: int = 1

    @property
    def name(self) -> str:
        return self.measure.__module__.rpartition(".")[2].replace("_", "-")

    @property
    def text(self) -> str:
        """The help text; its first line is the description."""
        return sys.modules[self.measure.__module__].__doc__ or ""

    @property
    def description(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def is_recorded(self) -> bool:
        return get_type_hints(self.measure)["return"] is not NoneType

    @property
    def options(self) -> list[click.Parameter]:
        """Its own arguments and options."""
        hints = get_type_hints(self.measure, include_extras=True)
        _, *found = inspect.signature(self.measure).parameters.values()
        return [_to_click(one, hints[one.name]) for one in found]

    def command(self) -> click.Command:
        """The benchmark as a command."""
        folder = click.Path(file_okay=False, path_type=Path)
        runs = partial(click.Option, ["--runs"], type=_KINDS[int], help="How often to measure.")
        shared: list[click.Parameter] = [
            runs(default=self.runs, show_default=True),
            click.Option(["--scratch"], type=folder, help="Where to put its files."),
        ]
        if self.is_recorded:
            shared.append(click.Option(["--output"], type=folder, help="Folder to record it in."))
        parameters = [*self.options, *shared]
        return click.Command(self.name, params=parameters, callback=self._run, help=self.text)

    def _run(
        self, *, runs: int, scratch: Path | None, output: Path | None = None, **options: Any
    ) -> None:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            figures = self.measure(Work(Path(folder), runs), **options)
        if output is not None and figures is not None:
            plain = {key: _plain(one) for key, one in options.items()}
            record = {"options": {"runs": runs, **plain}, **figures}
            arguments = click.get_current_context().obj
            click.echo(write_record(output, self.name, arguments, record))


DECLARED: dict[str, Bench] = {}
"""Benchmarks of the modules imported so far, by name."""


def bench(**settings: Any) -> Callable[[Measure], Measure]:
    """Declares a function as a benchmark; `settings` are fields of Bench."""

    def declare(measure: Measure) -> Measure:
        found = Bench(measure, **settings)
        DECLARED[found.name] = found
        return measure

    return declare


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

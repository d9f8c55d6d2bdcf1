"""Options that several commands share, and what they turn into."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from dflash_trt.core.limits import MAX_THREADS
from dflash_trt.decoding.drafter_kinds import DFLASH, DRAFTERS, NOBODY
from dflash_trt.decoding.schedule import BlockSchedule
from dflash_trt.errors import DflashError, refuse_options
from dflash_trt.hardware.cores import AUTO, ThreadChoice, available_cores
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.text.hub_prompts import EXAMPLE
from dflash_trt.text.prompts import STDIN, check_texts, encode_prompts, read_given, read_stdin
from dflash_trt.text.task_sets import Task, TaskSet, encode_tasks, name_sources, read_task_sets
from dflash_trt.text.tokenizer import BundleTokenizer

if TYPE_CHECKING:  # commands that run no pair should not wait for what runs one
    from dflash_trt.bundle.manifest import Manifest
    from dflash_trt.decoding import Request
    from dflash_trt.pair import LoadedPair

F = TypeVar("F", bound=Callable[..., Any])
TemplateVariables = dict[str, bool | str]
"""Variables of a chat template by name."""


class _GivenPath(click.Path):
    """A path that is not empty, `Path("")` would be the folder one is in, and that can be one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not value.strip():
            self.fail("is empty; name one.", param, ctx)
        try:
            return super().convert(value, param, ctx)
        except ValueError:  # a null character, or what no file system can encode
            self.fail(f"{value!a} can be no path.", param, ctx)


class _Layers(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    name = "layers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        items = [item.strip() for item in value.split(",")]
        if not all(item.isdecimal() and len(item) < 6 for item in items):
            self.fail(f"{value!r} is no list of layers, as 1,8,15", param, ctx)
        return tuple(int(item) for item in items)


LAYERS = _Layers()
PATH = _GivenPath(path_type=Path)
FILE = _GivenPath(dir_okay=False, path_type=Path)
FOLDER = _GivenPath(file_okay=False, path_type=Path)


def option_group(name: str, kind: type[Any], *options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Adds `options` to a command, which gets their values as `name`, an instance of `kind`.

    `kind` is a dataclass with a field for each option, of the option's parameter name. Its fields
    may be groups too, which stand above it; one without an option keeps its default.
    """
    taken = [field.name for field in fields(kind)]

    def decorate(function: F) -> F:
        @wraps(function)
        def collect(**given: Any) -> Any:
            values = {field: given.pop(field) for field in taken if field in given}
            return function(**given, **{name: kind(**values)})

        command: Any = collect
        for option in reversed(options):
            command = option(command)
        decorated: F = command
        return decorated

    return decorate


def template_option(why: str) -> Callable[[F], F]:
    """The option as `template_options`; `why` goes on from what it is in the help text."""
    return click.option(
        "--template-option",
        "template_options",
        multiple=True,
        metavar="NAME=VALUE",
        callback=_read_variables,
        help=f"Variable of the chat template, as enable_thinking=false{why}; repeatable.",
    )


def _read_variables(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> TemplateVariables:
    """NAME=VALUE of a chat template; true and false are no texts."""
    found: TemplateVariables = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name.isidentifier() or name in found:
            what = f"{value!r} is not one NAME=VALUE, as enable_thinking=false"
            raise DflashError(what, where="--template-option", usage=True)
        found[name] = {"true": True, "false": False}.get(text.lower(), text)
    return found


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The prompts that a command runs, and the system message before each."""

    prompt: tuple[str, ...]
    prompt_file: Path | None
    system: str | None
    raw: bool
    template_options: TemplateVariables

    def encode(self, tokenizer: BundleTokenizer) -> list[list[int]]:
        """Token ids of the prompts."""
        if self.raw or tokenizer.chat_template is None:
            what = "does not go with --raw" if self.raw else "needs a chat template, there is none"
            given = {"--system": self.system, "--template-option": self.template_options or None}
            refuse_options(given, what)
        return encode_prompts(
            tokenizer,
            self.read(),
            raw=self.raw,
            system=self.system,
            variables=self.template_options,
        )

    def read(self) -> list[str]:
        """The prompts as text; "-" is what stands on stdin."""
        if not self.prompt or self.prompt_file is not None:
            given = self.prompt[0] if self.prompt else None
            return [one.text for one in read_given(given, self.prompt_file)]
        if self.prompt.count(STDIN) > 1:
            raise DflashError("stdin can be read once", where="--prompt", usage=True)
        texts = [read_stdin() if one == STDIN else one for one in self.prompt]
        check_texts(texts, None)
        return texts


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Named sets of prompts, or one prompt, to measure with, and how each is continued."""

    prompt: str | None
    sources: tuple[str, ...]
    limit_prompts: int | None
    max_tokens: int
    sampling: SamplingParams

    @property
    def are_named(self) -> bool:
        """Whether sets were asked for by name: figures are shown for each then."""
        return bool(self.sources)

    def encode(self, tokenizer: BundleTokenizer, default: Path | None = None) -> list[Task]:
        """The prompts of all sets as token ids, those of the file `default` if none are given."""
        return encode_tasks(tokenizer, self.read(default))

    def read(self, default: Path | None = None) -> list[TaskSet]:
        """The sets as text, likewise."""
        if not self.sources:
            if self.prompt is None and default is None:
                fix = "pass --prompt TEXT or --prompts FILE"
                raise DflashError("no prompt", fix=fix, usage=True)
            records = read_given(self.prompt, None, default)
            return [TaskSet("prompts", tuple(records[: self.limit_prompts]))]
        if self.prompt is not None:
            raise DflashError("give --prompts or --prompt, not both", usage=True)
        return read_task_sets(name_sources(self.sources), self.limit_prompts)

    def check(self, pair: LoadedPair, requests: Sequence[Request], tasks: Sequence[Task]) -> None:
        """Raises DflashError (usage) for a request that `pair` cannot run, naming its prompt."""
        if not self.sources:
            pair.check(requests)
            return
        for request, task in zip(requests, tasks, strict=True):
            try:
                pair.check([request])
            except DflashError as error:
                fix, usage = error.fix, error.usage
                raise DflashError(error.what, where=task.label, fix=fix, usage=usage) from error


sets_option = click.option(
    "--prompts",
    "sources",
    metavar="[NAME=]FILE",
    multiple=True,
    help='A named set: a .jsonl with a "prompt" each, another file as one prompt, or '
    f"{EXAMPLE}; repeatable.",
)
limit_option = click.option(
    "--limit-prompts", type=click.IntRange(1), help="Only the first so many of every set."
)
prompt_options = option_group(
    "prompts",
    PromptOptions,
    click.option(
        "--prompt",
        multiple=True,
        help="The prompt's text; repeatable, and - is the text on stdin.",
    ),
    click.option(
        "--prompt-file",
        type=FILE,
        help='One prompt (the whole file), or many (.jsonl with a "prompt" each).',
    ),
    click.option("--system", help="A system message before every prompt."),
    template_option(""),
    click.option("--raw", is_flag=True, help="Do not apply the chat template."),
)
_TEMPERATURE = click.option("--temperature", type=float, default=0.0, help="0 is greedy.")
sampling_options = option_group(
    "sampling",
    SamplingParams,
    _TEMPERATURE,
    click.option("--top-k", type=int, help="Sample from the k likeliest tokens."),
    click.option("--top-p", type=float, default=1.0, help="Nucleus mass."),
    click.option("--seed", type=int, default=0, help="Sampling seed."),
)
task_options = option_group(
    "prompts",
    TaskOptions,
    click.option("--prompt", help="The prompt's text."),
    sets_option,
    limit_option,
    click.option("--max-tokens", type=click.IntRange(2), default=128),
    # Cuts and seeds hardly move figures over many answers.
    option_group("sampling", SamplingParams, _TEMPERATURE),
)
bundle_argument = click.argument("bundle", type=FOLDER)
optional_bundle_argument = click.argument("bundle", type=FOLDER, required=False)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class _Threads(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A number of CPU threads, or "auto"; a note warns of more than there are cores."""

    name = "threads"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> ThreadChoice:
        if value == AUTO:
            return AUTO
        count: int = click.IntRange(1, MAX_THREADS).convert(value, param, ctx)
        cores = available_cores()
        if count > cores:
            has = "core is" if cores == 1 else "cores are"
            what = f"--threads {count}, but {cores} physical {has} free for this process"
            show_note(f"{what}: more threads wait for each other")
        return count


threads_option = click.option(
    "--threads",
    metavar="auto|N",
    type=_Threads(),
    default=AUTO,
    help="CPU threads per step; auto: the physical cores that this process may use, one where "
    "the target is too small to split. No bit of a result depends on it.",
)
_WHO = (
    "Who fills a block: the bundle's draft, or what followed the same tokens before, in prompt or "
    "answer (vLLM's ngram)"
)
drafter_option = click.option(
    "--drafter", type=click.Choice(list(DRAFTERS)), default=DFLASH, help=f"{_WHO}."
)
speculation_option = click.option(
    "--drafter",
    type=click.Choice([*DRAFTERS, NOBODY]),
    default=DFLASH,
    help=f"{_WHO}; none: plain decoding, the target alone.",
)
block_schedule_option = click.option(
    "--block-schedule",
    metavar="auto|none|N|FILE",
    default="auto",
    help="Block size by batch: the bundle's own from `tune` (without one, no drafts while they "
    "cost more than they bring), none: the trained block always, N: that block always, or a "
    "file's.",
)


def print_json(value: Any) -> None:
    """Prints `value` as JSON, which has no NaN and no infinity: their names instead."""
    click.echo(json.dumps(_finite(value), indent=2))


def refuse_given(context: click.Context, names: Collection[str], what: str) -> None:
    """Raises DflashError (usage) where the command line gives one of the parameters `names`."""
    for parameter in context.command.params:
        name = str(parameter.name)
        if name in names and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            is_argument = isinstance(parameter, click.Argument)
            where = parameter.human_readable_name if is_argument else parameter.opts[0]
            raise DflashError(what, where=where, usage=True)


def parse_counts(
    text: str | None, option: str, low: int, high: int, default: list[int]
) -> list[int]:
    """Integers of a comma-separated list, each within low … high; `default` for None."""
    if text is None:
        return default
    counts: list[int] = []
    for item in text.split(","):
        if not item.strip().isdecimal() or not low <= int(item) <= high:
            what = f"{item.strip()!r} is not a whole number from {low} to {high}"
            raise DflashError(what, where=option, usage=True)
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


def name_threads(manifest: Manifest, threads: int) -> str:
    """The threads behind a measurement, for the end of its line; none where a device runs."""
    if not manifest.is_on_cpu:
        return ""
    return f", {threads} CPU thread{'s'[: threads > 1]}"


def show_thread_note(schedule: BlockSchedule | None, threads: int) -> None:
    """Says on stderr when a schedule was measured with another number of CPU threads."""
    measured = None if schedule is None else schedule.measured
    if measured is not None and measured.threads != threads:
        show_note(
            f"the block schedule was measured with --threads {measured.threads}, not "
            f"{threads}: `dflash-trt tune --threads {threads}` measures again"
        )


def show_note(line: str | None) -> None:
    """Says on stderr what may be worth looking at, if anything is."""
    if line is not None:
        click.echo(f"note: {line}", err=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

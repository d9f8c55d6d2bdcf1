"""`--template-option`: variables of a chat template, for every command that renders one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from dflash_trt.errors import DflashError

F = TypeVar("F", bound=Callable[..., object])
TemplateVariables = dict[str, bool | str]


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

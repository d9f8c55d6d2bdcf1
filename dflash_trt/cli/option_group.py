"""Options that belong together reach a command as one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def option_group(name: str, kind: type[Any], *options: Callable[[F], F]) -> Callable[[F], F]:
    """Adds `options` to a command, which gets their values as `name`, an instance of `kind`.

    `kind` is a dataclass with a field for each option, of the option's parameter name.
    """
    taken = [field.name for field in fields(kind)]

    def decorate(function: F) -> F:
        @wraps(function)
        def collect(**given: Any) -> Any:
            values = {field: given.pop(field) for field in taken}
            return function(**given, **{name: kind(**values)})

        command: Any = collect
        for option in reversed(options):
            command = option(command)
        decorated: F = command
        return decorated

    return decorate

"""The project's one error type: what went wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

EXIT_FAILED = 1
EXIT_USAGE = 2
MAX_LINE = 1200
"""Characters of an error: two long paths, and what is wrong with them."""


class DflashError(Exception):
    """A failure that a user can act on; the command line prints it as one line.

    Args:
        what: what is wrong, with the values that show it.
        where: the file, tensor, key or option concerned.
        fix: what to do about it.
        usage: True when the command itself was wrong (exit code 2), False for a
            failed check or a run-time failure (exit code 1).
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | Path | None = None,
        fix: str | None = None,
        usage: bool = False,
    ) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.fix = fix
        self.usage = usage
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """The single line shown to the user: `where: what; fix`."""
        line = self.what if self.where is None else f"{self.where}: {self.what}"
        line = line if self.fix is None else f"{line}; {self.fix}"
        return one_line(printable(line), MAX_LINE)

    @property
    def exit_code(self) -> int:
        return EXIT_USAGE if self.usage else EXIT_FAILED


def install_extra(extra: str) -> str:
    """What installs the packages of an extra: the project's name is not on the package index."""
    return f"pip install -e '.[{extra}]' in a checkout of dflash-trt"


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Imports what an extra brings; DflashError where that fails, which `purpose` begins."""
    try:
        return import_module(module)
    except ImportError as error:
        what = f"{purpose} needs {module}, which cannot be imported ({error})"
        raise DflashError(what, fix=install_extra(extra)) from error


def refuse_options(given: Mapping[str, object], what: str, fix: str | None = None) -> None:
    """Raises DflashError (usage) for the first option of `given` that has a value."""
    for option, value in given.items():
        if value is not None and value is not False and value != ():
            raise DflashError(what, where=option, fix=fix, usage=True)


def printable(text: str) -> str:
    """`text` with all else escaped: names from files may hold line breaks and terminal codes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(text: object, limit: int = 300) -> str:
    """`text` folded to one line of at most `limit` characters, for use inside an error."""
    folded = " ".join(str(text).split())
    return folded if len(folded) <= limit else folded[: limit - 1] + "…"


def first_few(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first `most` of `names`, and how many more there are."""
    more = len(names) - most
    return separator.join(names[:most]) + (f" and {more} more" if more > 0 else "")


def closest(name: str, known: list[str]) -> str | None:
    """The one of `known` that is most like `name`; None where none is like it."""
    # Matching takes time that grows with the square of the name's length.
    return next(iter(difflib.get_close_matches(name[:100], known, n=1, cutoff=0.4)), None)


def nearest(name: str, known: list[str]) -> str:
    """` (nearest: 'x')` for a name that is not known, or those that are where none is like it."""
    close = closest(name, known)
    return f" (known: {first_few(known, 16)})" if close is None else f" (nearest: {close!r})"

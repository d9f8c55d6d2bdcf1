"""Values of a request: checked, lists kept as tuples."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from dflash_trt.errors import DflashError


def as_ids(name: str, token_ids: Iterable[int]) -> tuple[int, ...]:
    """Raises DflashError (usage): one is no integer."""
    try:
        return tuple(map(operator.index, token_ids))
    except TypeError as error:
        raise DflashError("it must be a list of token ids", where=name, usage=True) from error


def as_texts(name: str, texts: object) -> tuple[str, ...]:
    """Raises DflashError (usage): one is no text, or empty."""
    if not isinstance(texts, list | tuple) or not all(
        isinstance(text, str) and text for text in texts
    ):
        raise DflashError("it must be a list of texts, none of them empty", where=name, usage=True)
    return tuple(texts)


def check_least(name: str, value: int | None, least: int) -> None:
    """Raises DflashError (usage) for what is given, and no integer of at least `least`."""
    if value is not None and (type(value) is not int or value < least):
        what = f"{value!r} is not an integer of at least {least}"
        raise DflashError(what, where=name, usage=True)


def check_kind(name: str, value: object, kind: type) -> None:
    """Raises DflashError (usage) unless the value is of `kind`."""
    if not isinstance(value, kind):
        raise DflashError(f"it must be {kind.__name__}", where=name, usage=True)

"""Lists in a request, checked and kept as tuples."""

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

"""A finding of the check, and how what stops one of them is kept from the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dflash_trt.errors import DflashError, one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One finding; `passed` None where there is a figure and no verdict.

    `name` says what holds if it passed.
    """

    name: str
    passed: bool | None
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As strict JSON has it: numbers of NumPy are Python's, NaN and infinities are words."""
        raw: dict[str, Any] = _plain(asdict(self))
        return raw


class PartSkippedError(DflashError):
    """What a part needs is not here: no failure, but the record says so."""


class OutOfTimeError(DflashError):
    """A part's time is up; what it found so far stays."""


def attempt(name: str, find: Callable[[], Probe | Iterable[Probe]]) -> Iterator[Probe]:
    """What `find` finds; an error of it is a finding called `name`, and ends nothing else."""
    try:
        found = find()
        yield from [found] if isinstance(found, Probe) else found
    except (PartSkippedError, OutOfTimeError):
        raise
    except Exception as error:  # what a library does here for the first time is a finding
        yield Probe(name=name, passed=False, detail=describe_error(error))


def describe_error(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, DflashError):
        return error.message
    return f"{type(error).__name__}: {one_line(error)}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

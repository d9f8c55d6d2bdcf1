"""Repeated measurements: interleaved runs, their spread, and ratios of neighbouring runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

Value = TypeVar("Value")
Key = TypeVar("Key")
SpreadFigures = dict[str, float]


def take_turns(
    ways: Mapping[Key, Callable[[], Value]], runs: int, *, rotate: bool = False
) -> dict[Key, list[Value]]:
    """Runs all `ways` in turn, `runs` times, so that changes of the machine affect all alike.

    With `rotate` each turn begins with another way. Returns the results by way, in run order.
    """
    found: dict[Key, list[Value]] = {name: [] for name in ways}
    order = deque(ways)
    for _ in range(runs):
        for name in order:
            found[name].append(ways[name]())
        order.rotate(rotate)
    return found


def spread(values: Sequence[float]) -> SpreadFigures:
    """Median and range of repeated measurements."""
    return {"median": median(values), "min": min(values), "max": max(values), "runs": len(values)}


def spreads(rows: Sequence[Mapping[str, float]], *names: str) -> dict[str, SpreadFigures]:
    """The spread of each of `names` over `rows`."""
    return {name: spread([row[name] for row in rows]) for name in names}


def spread_of_ratios(above: Sequence[float], below: Sequence[float]) -> SpreadFigures:
    """The spread of `above` / `below`, run by run."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def show(figures: SpreadFigures, form: str) -> str:
    """A spread as text: `median (least … greatest)`, each in the format `form`."""
    median, low, high = (format(figures[name], form) for name in ("median", "min", "max"))
    return f"{median} ({low} … {high})"

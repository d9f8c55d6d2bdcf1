"""Throughput of each configuration at one interactivity, and its ratio to the baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_perf.front import Front, FrontPoint, FrontValue
from dflash_perf.harness.points import SweepPoint
from dflash_perf.harness.sweep_config import OfferedLoad

NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class SweepAnswer:
    """Each configuration's throughput at one interactivity, in tokens/s.

    A value of None is "not measured": no load let a user read so fast, and nothing is extrapolated.
    `nearest` then has the closest point of the front.
    """

    interactivity: float
    baseline: str
    values: dict[str, FrontValue | None]
    nearest: dict[str, FrontPoint | None] = field(default_factory=dict)

    def ratio(self, configuration: str) -> float | None:
        """Throughput ÷ the baseline's at the same interactivity, or less than that where
        `is_least`; None where the baseline's own is not known there."""
        mine, other = self.values.get(configuration), self.values.get(self.baseline)
        if mine is None or other is None or (other.is_least and mine is not other):
            return None
        return mine.throughput / other.throughput

    def is_least(self, configuration: str) -> bool:
        """Whether heavier loads, which were not measured, might give more."""
        value = self.values.get(configuration)
        return value is not None and value.is_least

    def to_json(self) -> dict[str, Any]:
        return {
            "interactivity": self.interactivity,
            "baseline": self.baseline,
            "configurations": {
                name: None
                if value is None
                else {
                    "throughput": value.throughput,
                    "ratio": self.ratio(name),
                    "below": _bracket(value.below),
                    "above": _bracket(value.above),
                    "points_near": value.near,
                    "is_least": value.is_least,
                }
                for name, value in self.values.items()
            },
            "nearest": {name: _bracket(one) for name, one in self.nearest.items() if one},
        }

    def describe_missing(self, configuration: str) -> str:
        """Says that it is not measured there, and names the nearest measured point."""
        near = self.nearest.get(configuration)
        return NOT_MEASURED if near is None else f"{NOT_MEASURED}; nearest {_describe_point(near)}"

    def lines(self, unit: str) -> list[str]:
        """One line per configuration, with the measured points around the value."""
        shown = [f"at {self.interactivity:g} tokens/s per user:"]
        for name, value in self.values.items():
            if value is None:
                shown.append(f"  {name}: {self.describe_missing(name)}")
                continue
            ratio, compared = self.ratio(name), ""
            if name != self.baseline:
                least = at_least(self.is_least(name))
                known = None if ratio is None else f"{least}{ratio:.2f} × {self.baseline}"
                compared = f", {known or f'ratio {NOT_MEASURED}'}"
            line = f"  {name}: {at_least(value.is_least)}{value.throughput:,.0f} {unit}{compared}"
            shown.append(f"{line}; {describe_bracket(value)}")
        return shown


def build_fronts(points: Sequence[SweepPoint]) -> dict[str, Front]:
    """One front per configuration, of the points that have both figures."""
    by_name: dict[str, list[FrontPoint]] = {}
    for point in points:
        found = by_name.setdefault(point.configuration, [])
        interactivity, throughput = point.interactivity, point.throughput
        if interactivity is not None and throughput is not None:
            found.append(FrontPoint(interactivity, throughput.mean, point.load.label))
    return {name: Front(found) for name, found in by_name.items()}


def answer(points: Sequence[SweepPoint], interactivity: float, baseline: str) -> SweepAnswer:
    """Every configuration's answer at `interactivity`, in the order of `points`."""
    fronts = build_fronts(points)
    values = {name: front.at(interactivity) for name, front in fronts.items()}
    missing = [name for name, value in values.items() if value is None]
    nearest = {name: fronts[name].nearest(interactivity) for name in missing}
    return SweepAnswer(interactivity, baseline, values, nearest)


def loads_between(points: Sequence[SweepPoint], targets: Sequence[float]) -> list[OfferedLoad]:
    """Concurrencies to measure between the two points around each target interactivity.

    Each is the geometric mean of its neighbours'. Empty if every front has enough points there, or
    no concurrency lies in between.
    """
    concurrency = {point.load.label: point.load.concurrency for point in points}
    found: set[int] = set()
    for front in build_fronts(points).values():
        for target in targets:
            value = front.at(target)
            if value is None or not value.is_sparse:
                continue
            low, high = concurrency[value.below.label], concurrency[value.above.label]
            if low is not None and high is not None:
                found.add(round((low * high) ** 0.5))
    known = set(concurrency.values())
    return [OfferedLoad(concurrency=count) for count in sorted(found - known)]


def throughput_unit(points: Sequence[SweepPoint]) -> str:
    """The unit of throughput: tokens/s per GPU, or per server where GPUs are not given."""
    per_gpu = all(point.value("output_throughput_per_gpu") for point in points)
    return "tokens/s per GPU" if points and per_gpu else "tokens/s per server"


def at_least(is_least: bool) -> str:
    """The sign before a figure that is a lower bound."""
    return "≥ " if is_least else ""


def describe_bracket(value: FrontValue) -> str:
    """The measured points around a value, and a remark if there are few."""
    if value.is_least:
        return f"measured {_describe_point(value.below)}; heavier loads were not"
    ends = [_describe_point(one) for one in dict.fromkeys((value.below, value.above))]
    text = f"measured {' and '.join(ends)}" if len(ends) == 1 else f"between {' and '.join(ends)}"
    if value.is_sparse:
        text += f"; few points: {value.near} measured within a factor of two"
    return text


def _describe_point(point: FrontPoint) -> str:
    return f"{point.interactivity:,.0f} → {point.throughput:,.0f} ({point.label})"


def _bracket(point: FrontPoint) -> dict[str, Any]:
    return {
        "interactivity": point.interactivity,
        "throughput": point.throughput,
        "load": point.label,
    }

"""Throughput of each configuration at one interactivity, and its ratio to the baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash_perf.front import Front, FrontPoint, FrontValue
from dflash_perf.harness.points import SweepPoint
from dflash_perf.harness.sweep_config import OfferedLoad

NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class SweepAnswer:
    """Each configuration's throughput at one interactivity, in tokens/s.

    A front without a value there is "not measured": no load let a user read so fast, and nothing is
    extrapolated.
    """

    interactivity: float
    baseline: str
    fronts: dict[str, Front]

    @property
    def values(self) -> dict[str, FrontValue | None]:
        return {name: front.at(self.interactivity) for name, front in self.fronts.items()}

    def ratio(self, configuration: str) -> float | None:
        """Throughput ÷ the baseline's at the same interactivity, or less than that where
        `is_least`; None where the baseline's own is not known there."""
        mine, other = (self.values.get(name) for name in (configuration, self.baseline))
        if mine is None or other is None:
            return None
        is_unknown = other.is_least and configuration != self.baseline
        return None if is_unknown else mine.throughput / other.throughput

    def to_json(self) -> dict[str, Any]:
        return {
            "interactivity": self.interactivity,
            "baseline": self.baseline,
            "configurations": {
                name: None if value is None else {**asdict(value), "ratio": self.ratio(name)}
                for name, value in self.values.items()
            },
        }

    def describe(self, configuration: str) -> str:
        """The measured points around its value, or that it is not measured and the nearest one."""
        if (value := self.values[configuration]) is not None:
            return value.describe()
        points = self.fronts[configuration].points
        return NOT_MEASURED + (f"; nearest {points[-1].describe()}" if points else "")

    def lines(self, unit: str) -> list[str]:
        """One line per configuration, with the measured points around the value."""
        shown = [f"at {self.interactivity:g} tokens/s per user:"]
        for name, value in self.values.items():
            line = f"  {name}: "
            if value is not None:
                line += f"{value.sign}{value.throughput:,.0f} {unit}"
                ratio = self.ratio(name)
                known = None if ratio is None else f"{value.sign}{ratio:.2f} × {self.baseline}"
                compared = f", {known or f'ratio {NOT_MEASURED}'}"
                line += f"{'' if name == self.baseline else compared}; "
            shown.append(line + self.describe(name))
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


def loads_between(points: Sequence[SweepPoint], targets: Sequence[float]) -> list[OfferedLoad]:
    """Concurrencies to measure between the two points around each target interactivity.

    Each is the geometric mean of its neighbours'. Empty if every front has enough points there, or
    no concurrency lies in between.
    """
    concurrency = {point.load.label: point.load.concurrency for point in points}
    found: set[int] = set()
    for front in build_fronts(points).values():
        for value in map(front.at, targets):
            if value is None or not value.is_sparse:
                continue
            low, high = concurrency[value.below.label], concurrency[value.above.label]
            if low is not None and high is not None:
                found.add(round((low * high) ** 0.5))
    return [OfferedLoad(concurrency=one) for one in sorted(found - set(concurrency.values()))]


def throughput_unit(points: Sequence[SweepPoint]) -> str:
    """The unit of throughput: tokens/s per GPU, or per server where GPUs are not given."""
    per_gpu = all(point.value("output_throughput_per_gpu") for point in points)
    return "tokens/s per GPU" if points and per_gpu else "tokens/s per server"

"""Throughput at a fixed interactivity: Pareto front and monotone interpolation through it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NEAR = 2.0
FEW_POINTS = 4


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A point: tokens/s per user, tokens/s per GPU or per server, and the name of its load."""

    interactivity: float
    throughput: float
    label: str

    def describe(self) -> str:
        return f"{self.interactivity:,.0f} → {self.throughput:,.0f} ({self.label})"


@dataclass(frozen=True, slots=True)
class FrontValue:
    """Throughput at an interactivity, between the measured points `below` and `above`.

    Both are the same point if one lies exactly there. Where everything measured is faster for a
    user, `is_least`: the throughput is that of the slowest point, which keeps the interactivity
    and more, and heavier loads might reach a higher one. `near` counts the front's points within a
    factor of NEAR: with fewer than FEW_POINTS the curve between them is little more than a guess.
    """

    interactivity: float
    throughput: float
    below: FrontPoint
    above: FrontPoint
    near: int
    is_least: bool = False

    @property
    def is_sparse(self) -> bool:
        return self.near < FEW_POINTS and not self.is_least

    @property
    def sign(self) -> str:
        """What stands before a figure that is a lower bound."""
        return "≥ " if self.is_least else ""

    def describe(self) -> str:
        """The measured points around it, and a remark if there are few."""
        if self.is_least:
            return f"measured {self.below.describe()}; heavier loads were not"
        text = f"measured {self.below.describe()}"
        if self.below != self.above:
            text = f"between {self.below.describe()} and {self.above.describe()}"
        few = f"; few points: {self.near} measured within a factor of two"
        return text + few * self.is_sparse


class Front:
    """A Pareto front, and a curve through its points.

    The curve is the monotone cubic of Fritsch and Carlson (SIAM J. Numer. Anal. 17, 1980; SciPy's
    PCHIP). It stays between the two neighbouring points and does not go past the ends.
    """

    def __init__(self, points: Iterable[FrontPoint]) -> None:
        self.points = pareto_front(points)

    def at(self, interactivity: float) -> FrontValue | None:
        """Throughput at that interactivity; None above the front's range: it is not reached."""
        points = self.points
        if not points or interactivity > points[-1].interactivity:
            return None
        if interactivity < points[0].interactivity:
            least = points[0]
            return FrontValue(interactivity, least.throughput, least, least, 0, is_least=True)
        below = [point for point in points if point.interactivity <= interactivity][-1]
        above = next(point for point in points if point.interactivity >= interactivity)
        near = sum(1 / NEAR <= point.interactivity / interactivity <= NEAR for point in points)
        value = below.throughput if below is above else self._interpolate([interactivity])[0]
        return FrontValue(interactivity, value, below, above, near)

    def curve(self) -> list[tuple[float, float]]:
        """(interactivity, throughput) along the front to draw; the point itself if it is alone."""
        points = self.points
        if len(points) < 2:
            return [(point.interactivity, point.throughput) for point in points]
        low, high = points[0].interactivity, points[-1].interactivity
        rates = [low + (high - low) * index / 199 for index in range(200)]
        return list(zip(rates, self._interpolate(rates), strict=True))

    def _interpolate(self, rates: list[float]) -> list[float]:
        from scipy.interpolate import PchipInterpolator

        xs = [point.interactivity for point in self.points]
        ys = [point.throughput for point in self.points]
        # Rounding may put the last sample past the end, where SciPy has no value.
        clipped = [min(max(rate, xs[0]), xs[-1]) for rate in rates]
        return [float(value) for value in PchipInterpolator(xs, ys, extrapolate=False)(clipped)]


def pareto_front(points: Iterable[FrontPoint]) -> tuple[FrontPoint, ...]:
    """Points that no other equals or beats in both; interactivity rises, throughput falls."""
    front: list[FrontPoint] = []
    best = float("-inf")
    for point in sorted(points, key=lambda p: (p.interactivity, p.throughput), reverse=True):
        if point.throughput > best:
            front.append(point)
            best = point.throughput
    return tuple(reversed(front))

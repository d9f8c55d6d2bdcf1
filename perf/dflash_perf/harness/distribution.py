"""Summary statistics: percentiles within a run, confidence intervals over repeated runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
CONFIDENCE = 0.95


def percentile(values: Sequence[float], rank: float) -> float:
    """The percentile `rank` (0 … 100), interpolated linearly as by NumPy's default."""
    return float(np.percentile(values, rank))


def describe(values: Sequence[float]) -> dict[str, float]:
    """avg, min, max, percentiles and the population standard deviation (divided by n)."""
    ranks = np.percentile(values, PERCENTILES)
    return {
        "avg": float(np.mean(values)),
        "min": float(min(values)),
        "max": float(max(values)),
        **{f"p{rank}": float(value) for rank, value in zip(PERCENTILES, ranks, strict=True)},
        "std": float(np.std(values)),
    }


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over repeated runs.

    `half_width` is half of the mean's 95 % confidence interval, by Student's t with count - 1
    degrees of freedom; None with a single run.
    """

    mean: float
    low: float
    high: float
    count: int
    half_width: float | None

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """The spread of `values`; None if there are none."""
        if not values:
            return None
        count, mean = len(values), math.fsum(values) / len(values)
        half_width = None
        if count > 1:
            from scipy.special import stdtrit

            deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
            quantile = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
            half_width = quantile * deviation / math.sqrt(count)
        return Spread(mean, min(values), max(values), count, half_width)

    def to_json(self) -> dict[str, float | int | None]:
        return {
            "mean": self.mean,
            "min": self.low,
            "max": self.high,
            "runs": self.count,
            "confidence_95_half_width": self.half_width,
        }

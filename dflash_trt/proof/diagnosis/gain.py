"""Is one acceptance length above another, or is it noise? Answers are drawn anew to tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.decoding.statistics import AcceptanceStatistics

DRAWS = 4000
LEVEL = 0.995
"""What an interval holds: a score of things are tried, and noise may be taken for none of them."""

MATTERS = 0.1
"""The least effect that is called one, in tokens a step."""

FEWEST = 6
"""Answers below which nothing is concluded: their spread says too little."""

LEAST = 0.01
"""What a share is taken for that is nothing at all."""

Counts = npt.NDArray[np.float64]
"""Of answers [n]: tokens that their steps emitted, and steps: [2,n]."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What a change makes of the acceptance length: relative, with an interval of LEVEL.

    0.05 is 5 % longer, and `tokens` what that is in tokens a step (of a share: the same ÷ 1).
    `is_known` is False with fewer than FEWEST answers.
    """

    value: float
    low: float
    high: float
    tokens: float
    is_known: bool

    @property
    def is_gain(self) -> bool:
        """Longer by what matters, and not by chance."""
        return self.is_known and self.tokens >= MATTERS and self.low > 0

    @property
    def is_loss(self) -> bool:
        """Shorter, likewise."""
        return self.is_known and self.tokens <= -MATTERS and self.high < 0

    def __str__(self) -> str:
        if not self.is_known:
            return "too few answers to compare"
        return f"{self.value:+.1%} ({self.low:+.1%} to {self.high:+.1%})"

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high, "known": self.is_known}


def count(statistics: Sequence[AcceptanceStatistics]) -> Counts:
    """The counts of answers that took a step."""
    pairs = [(one.step_tokens, one.steps) for one in statistics if one.steps]
    return np.array(pairs, np.float64).reshape(-1, 2).T


def measure_gain(base: Counts, other: Counts, *, paired: bool) -> Gain:
    """How much longer `other` answers' acceptance is than that of `base` ones.

    `paired`: both are of the same answers, or of answers to the same prompts, in order.
    """
    if not base.size or not other.size:
        return Gain(0.0, 0.0, 0.0, 0.0, False)
    before, after = (float(_lengths(one.sum(axis=1))) for one in (base, other))
    drawn = _draw(other, seed=0 if paired else 1) / _draw(base, seed=0) - 1
    enough = min(base.shape[1], other.shape[1]) >= FEWEST
    return Gain(after / before - 1, *_interval(drawn), after - before, enough)


def length_interval(counts: Counts) -> tuple[float, float]:
    """Where the acceptance length of such answers lies, at LEVEL."""
    return _interval(_draw(counts, seed=0)) if counts.size else (0.0, 0.0)


def _draw(counts: Counts, seed: int) -> Counts:
    """The acceptance lengths of DRAWS as many answers: [DRAWS]."""
    answers = counts.shape[1]
    picks = np.random.default_rng(seed).integers(0, answers, (DRAWS, answers))
    return _lengths(counts[:, picks].sum(axis=2))


def _lengths(sums: Counts) -> Counts:
    tokens, steps = np.maximum(sums, LEAST)
    lengths: Counts = tokens / steps
    return lengths


def _interval(values: Counts) -> tuple[float, float]:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)

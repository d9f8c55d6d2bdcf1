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

MATTERS = 0.03
"""The least relative effect on the acceptance length that is called one."""

LEAST_TOKENS = 0.1
"""The least effect in tokens a step: near 1 a few per cent are a stray draft now and then."""

FEWEST = 6
"""Answers below which nothing is concluded: their spread says too little."""

LEAST = 0.01
"""What a share is taken for that is nothing at all."""

Counts = npt.NDArray[np.float64]
"""Of answers [n]: tokens that their steps emitted, and steps: [2,n]."""

Picks = npt.NDArray[np.int64]
"""Which answers each draw has: [DRAWS,n]."""


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
        enough = self.value >= MATTERS and self.tokens >= LEAST_TOKENS
        return self.is_known and enough and self.low > 0

    @property
    def is_loss(self) -> bool:
        """Shorter, likewise."""
        enough = self.value <= -MATTERS and self.tokens <= -LEAST_TOKENS
        return self.is_known and enough and self.high < 0

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high, "known": self.is_known}


def count(statistics: Sequence[AcceptanceStatistics]) -> Counts:
    """The counts of answers that took a step."""
    pairs = [(one.step_tokens, one.steps) for one in statistics if one.steps]
    return np.array(pairs, np.float64).reshape(-1, 2).T


def paired_gain(base: Counts, changed: Counts) -> Gain:
    """What a change gains on the same answers, or on answers to the same prompts, in order."""
    if base.shape != changed.shape:
        raise ValueError(f"{base.shape[1]} answers are not paired with {changed.shape[1]}")
    picks = _draw(base.shape[1])
    return _gain(base, changed, picks, picks)


def group_gain(base: Counts, other: Counts) -> Gain:
    """How much longer `other` answers' acceptance is than that of `base` ones."""
    return _gain(base, other, _draw(base.shape[1], seed=1), _draw(other.shape[1], seed=2))


def length_interval(counts: Counts) -> tuple[float, float]:
    """Where the acceptance length of such answers lies, at LEVEL."""
    if not counts.shape[1]:
        return 0.0, 0.0
    return _interval(_lengths(counts, _draw(counts.shape[1])))


def _gain(base: Counts, other: Counts, picks: Picks, other_picks: Picks) -> Gain:
    if not base.size or not other.size:
        return Gain(0.0, 0.0, 0.0, 0.0, False)
    before, after = _length(base), _length(other)
    low, high = _interval(_lengths(other, other_picks) / _lengths(base, picks) - 1)
    enough = min(base.shape[1], other.shape[1]) >= FEWEST
    return Gain(after / before - 1, low, high, after - before, enough)


def _draw(answers: int, seed: int = 0) -> Picks:
    generator = np.random.default_rng(seed)
    return generator.integers(0, max(answers, 1), (DRAWS, answers))


def _length(counts: Counts) -> float:
    tokens, steps = counts.sum(axis=1)
    return float(max(tokens, LEAST) / max(steps, LEAST))


def _lengths(counts: Counts, picks: Picks) -> Counts:
    tokens, steps = np.maximum(counts[:, picks].sum(axis=2), LEAST)
    lengths: Counts = tokens / steps
    return lengths


def _interval(values: Counts) -> tuple[float, float]:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)

"""Predicts tokens and seconds of a decode step by batch and block, from `tune`'s measurements.

    tokens/s of a batch with block S = batch x E(S) / seconds(batch, S)
    E(S) = 1 + sum over j = 1 … S-1 of the product of the first j acceptance rates

S = 1 is decoding without drafts: E(1) = 1.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from dflash_trt.backends.base import TargetGraph
from dflash_trt.decoding.schedule import NO_SPECULATION, Measurements


class StepPrediction:
    """Seconds, tokens and tokens/s of steps.

    Args:
        measured: times and acceptance.
        fallback: the graph of steps without drafts.
        longest: the largest block that is considered.
    """

    def __init__(self, measured: Measurements, fallback: TargetGraph, longest: int) -> None:
        self._batches = [step.batch for step in measured.steps]
        self._rates = {
            block: tuple(rates)
            for block, rates in zip(measured.block_sizes, measured.acceptance, strict=True)
            if block <= longest
        }
        plain = [
            step.target_only if fallback == "target_only" else step.target
            for step in measured.steps
        ]
        self._seconds = {NO_SPECULATION: plain}
        for index, block in enumerate(measured.block_sizes):
            if block <= longest:
                self._seconds[block] = [step.blocks[index] for step in measured.steps]

    @property
    def choices(self) -> tuple[int, ...]:
        """The measured blocks, ascending; the first is 1, no speculation."""
        return tuple(self._seconds)

    def rates(self, block: int) -> tuple[float, ...] | None:
        """The measured acceptance rates of `block`'s drafts; None for a block not measured."""
        return self._rates.get(block)

    def seconds(self, batch: int, block: int) -> float:
        """Seconds of a step: interpolated between measured batches, proportional past the last."""
        times, batches = self._seconds[block], self._batches
        if batch >= batches[-1]:
            return times[-1] * batch / batches[-1]
        above = bisect_left(batches, batch)
        if above == 0:
            return times[0]
        low, high = batches[above - 1], batches[above]
        share = (batch - low) / (high - low)
        return times[above - 1] + share * (times[above] - times[above - 1])

    def tokens(self, block: int, factors: Sequence[float] = ()) -> float:
        """E(S); `factors[j]` scales the rate of draft j + 1 (1 where there is none)."""
        expected = reach = 1.0
        for position, rate in enumerate(self._rates.get(block, ())):
            factor = factors[position] if position < len(factors) else 1.0
            reach *= min(1.0, rate * factor)
            expected += reach
        return expected

    def tokens_per_second(self, batch: int, block: int, factors: Sequence[float] = ()) -> float:
        return batch * self.tokens(block, factors) / self.seconds(batch, block)

    def choose(self, batch: int, current: int, margin: float, factors: Sequence[float] = ()) -> int:
        """The block with most tokens/s; `current` unless that is `margin` better (0.02: 2 %)."""

        def rate(block: int) -> float:
            return self.tokens_per_second(batch, block, factors)

        best = max(self.choices, key=rate)
        return current if rate(best) <= rate(current) * (1 + margin) else best

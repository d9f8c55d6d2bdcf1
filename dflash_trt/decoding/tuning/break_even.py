"""Break-even: how many tokens a step with drafts has to bring before drafting pays.

As many as plain steps fit into its time. Without a measured time nobody is told anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import sqrt

import numpy as np

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.decoding.schedule import NO_SPECULATION, BlockSchedule
from dflash_trt.decoding.statistics import AcceptanceStatistics
from dflash_trt.decoding.tuning.bundle_schedule import AUTO, choose_schedule
from dflash_trt.errors import DflashError

FEWEST_STEPS = 32
"""Steps with drafts below which an acceptance length says little."""
_DEVIATIONS = 3.0


class DraftedSteps:
    """What steps with drafts brought; plain steps between them, which bring one token, are not."""

    def __init__(self, *of: AcceptanceStatistics) -> None:
        self._counts: Counter[int] = Counter()
        self._drafts = 0
        for one in of:
            self.add(one)

    def add(self, one: AcceptanceStatistics) -> None:
        """Adds a request's steps, or those of many."""
        drafted = one.position_trials[0] if one.position_trials else 0
        self._counts.update(dict(enumerate(one.acceptance_histogram, start=1)))
        self._counts[1] -= one.steps - drafted
        self._drafts += one.drafted_tokens

    @property
    def count(self) -> int:
        return self._counts.total()

    @property
    def block(self) -> float:
        """Mean rows of a step, the anchor's included; needs a step."""
        return 1 + self._drafts / self.count

    @property
    def length(self) -> float:
        """Mean tokens of a step; needs a step."""
        return sum(tokens * n for tokens, n in self._counts.items()) / self.count

    @property
    def highest_length(self) -> float:
        """What the mean could be, had chance been against these steps."""
        mean = self.length
        spread = sum(n * (tokens - mean) ** 2 for tokens, n in self._counts.items())
        return mean + _DEVIATIONS * sqrt(spread) / self.count


def schedule_break_even(schedule: BlockSchedule | None, block: float) -> float | None:
    """Tokens that a step of `block` rows has to bring, as `tune` timed it; None where it did not.

    Times are those of the fewest sequences, where drafts cost least; between measured blocks they
    are interpolated.
    """
    if schedule is None or schedule.measured is None:
        return None
    measured = schedule.measured
    step = measured.steps[0]
    rows = [NO_SPECULATION, *measured.block_sizes]
    seconds = float(np.interp(block, rows, [step.target_only, *step.blocks]))
    return seconds / step.target_only


def timed_break_even(steps: DraftedSteps, ratios: Sequence[float]) -> float | None:
    """The same where speculation ran `ratios` times as fast as plain decoding, with these steps.

    The best of the ratios counts: a machine that did something else makes drafts look dear.
    """
    return steps.length / max(ratios) if ratios and steps.count else None


def own_schedule(bundle: Bundle) -> BlockSchedule | None:
    """The bundle's own schedule; one that does not fit it has no say here."""
    try:
        return choose_schedule(bundle, AUTO)
    except DflashError:
        return None


def low_acceptance(steps: DraftedSteps, break_even: float | None, bundle: str) -> str | None:
    """A line that points to `diagnose` where drafts bring less than they cost; else None.

    Args:
        break_even: tokens that such a step has to bring; None if nobody measured it.
        bundle: what to call the bundle.
    """
    if break_even is None or steps.count < FEWEST_STEPS or steps.highest_length >= break_even:
        return None
    return (
        f"acceptance length {steps.length:.2f} stays below break-even {break_even:.2f}: "
        f"`dflash-trt diagnose {bundle} --prompts FILE` says why"
    )

"""Break-even: how many tokens a step with drafts has to bring before drafting pays.

As many as plain steps fit into its time. Without a measured time nobody is told anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.decoding.schedule import NO_SPECULATION, BlockSchedule
from dflash_trt.decoding.statistics import AcceptanceStatistics, RunningTotals
from dflash_trt.decoding.tuning.bundle_schedule import AUTO, choose_schedule
from dflash_trt.errors import DflashError

FEWEST_STEPS = 32
"""Steps with drafts below which an acceptance length says little."""
_CHANCE = 0.9
"""A length is low only below this share of what it has to reach."""


class DraftedSteps:
    """What steps with drafts brought; plain steps between them, which bring one token, are not.

    Attributes:
        count: steps.
        block: mean rows of one, the anchor's included; needs a step.
        length: mean tokens of one; needs a step.
    """

    def __init__(self, *of: AcceptanceStatistics | RunningTotals) -> None:
        self.count = sum(one.drafted_steps for one in of)
        plain = sum(one.steps for one in of) - self.count
        self.block = 1 + sum(one.drafted_tokens for one in of) / max(self.count, 1)
        self.length = (sum(one.step_tokens for one in of) - plain) / max(self.count, 1)


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


def tuned_ratio(schedule: BlockSchedule | None) -> float | None:
    """Tokens/s of one sequence ÷ the baseline's, as step times let expect; None without them.

    The acceptance length that `tune` saw ÷ how much longer a step takes; no run was timed whole.
    """
    if schedule is None or schedule.measured is None:
        return None
    measured, block = schedule.measured, schedule.block_size(1)
    break_even = schedule_break_even(schedule, block)
    if block not in measured.block_sizes or break_even is None or measured.steps[0].batch != 1:
        return None
    return measured.acceptance_lengths[measured.block_sizes.index(block)] / break_even


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
    """A line that says what to do where drafts bring less than they cost; else None.

    Args:
        break_even: tokens that such a step has to bring; None if nobody measured it.
        bundle: what to call the bundle.
    """
    if break_even is None or steps.count < FEWEST_STEPS:
        return None
    if steps.length >= _CHANCE * break_even:
        return None
    return (
        f"acceptance length {steps.length:.2f} stays below break-even {break_even:.2f}: "
        f"`--drafter none` is faster, `dflash-trt diagnose {bundle} --prompts FILE` says why"
    )


def advise_served(bundle: Bundle, totals: RunningTotals) -> str | None:
    """The same of a served bundle, by what its server has counted and `tune` timed."""
    steps = DraftedSteps(totals)
    break_even = schedule_break_even(own_schedule(bundle), steps.block)
    return low_acceptance(steps, break_even, "BUNDLE")

"""Break-even: how many tokens a step has to bring before drafting pays."""

from __future__ import annotations

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.tuning.bundle_schedule import AUTO, choose_schedule

BREAK_EVEN = 1.5
"""Where nothing was measured. A step with drafts verifies a block and runs the draft besides: on a
CPU that took 1.5 to 2 times as long as a plain step at blocks of 4 to 8, on a GPU less."""


def find_break_even(bundle: Bundle) -> float:
    """Tokens a step of one sequence has to bring, by the bundle's tuning; else BREAK_EVEN.

    A step with drafts takes as long as that many plain ones.
    """
    schedule = choose_schedule(bundle, AUTO)
    if schedule is None or schedule.measured is None:
        return BREAK_EVEN
    measured = schedule.measured
    step, sizes = measured.steps[0], measured.block_sizes
    chosen = schedule.blocks[0].block_size
    index = sizes.index(chosen) if chosen in sizes else len(sizes) - 1
    return step.blocks[index] / step.target_only

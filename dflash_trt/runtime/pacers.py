"""Who says how many rows the next step has: fixed, by a schedule, or live."""

from __future__ import annotations

from collections.abc import Callable

from dflash_trt.backends.base import ExecutorLimits
from dflash_trt.runtime.fixed_pacing import FixedPacer
from dflash_trt.runtime.live_pacing import LivePacer
from dflash_trt.runtime.options import GeneratorOptions
from dflash_trt.runtime.pacing import Pacer


def open_pacer(
    options: GeneratorOptions, limits: ExecutorLimits, clock: Callable[[], float]
) -> FixedPacer | Pacer:
    """What `options` ask for.

    Raises:
        DflashError: a schedule that does not fit the drafter (usage).
    """
    if options.schedule is not None:
        return Pacer(options.schedule, limits)
    return LivePacer(options, limits, clock) if options.live else FixedPacer(options, limits)

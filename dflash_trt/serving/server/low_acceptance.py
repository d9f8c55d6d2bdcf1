"""Says in the server's log, once, that drafts cost more than they bring."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dflash_trt.runtime import RequestStatistics
from dflash_trt.speculation.schedule import BlockSchedule
from dflash_trt.tuning.break_even import DraftedSteps, low_acceptance, schedule_break_even

FEWEST_STEPS = 256
"""Steps with drafts before anything is said: a few requests need not be like the others."""


class AcceptanceWatch:
    """Adds up the requests that end; `warn` hears of low acceptance once in its life.

    Without a schedule that was measured it says nothing. Any thread may call `take`.
    """

    def __init__(self, schedule: BlockSchedule | None, warn: Callable[[str], object]) -> None:
        self._schedule, self._warn = schedule, warn
        self._steps = DraftedSteps()
        self._said = schedule is None or schedule.measured is None
        self._lock = threading.Lock()

    def take(self, statistics: RequestStatistics) -> None:
        """Counts the steps of a request that ended."""
        with self._lock:
            if self._said:
                return
            self._steps.add(statistics)
            if self._steps.count < FEWEST_STEPS:
                return
            break_even = schedule_break_even(self._schedule, self._steps.block)
            line = low_acceptance(self._steps, break_even, "BUNDLE", fewest=FEWEST_STEPS)
            self._said = line is not None
        if line is not None:
            self._warn(line)

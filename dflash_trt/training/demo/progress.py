"""How training reports itself: one line now and then, with the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

LossReport = Callable[[str, int, int, float], None]
"""(what, steps done, steps in all, loss)"""

STEPS_A_LINE = 25


class Printer:
    """Prints every STEPS_A_LINE steps and at the end of a stretch, to stderr."""

    def __init__(self) -> None:
        self.what, self.started = "", 0.0

    def __call__(self, what: str, done: int, total: int, loss: float) -> None:
        if what != self.what:
            self.what, self.started = what, time.monotonic()
        if done % STEPS_A_LINE and done != total:
            return
        spent = time.monotonic() - self.started
        left = spent / done * (total - done)
        line = f"{what}: {done}/{total}, loss {loss:.3f}, {spent:.0f} s, {left:.0f} s left"
        print(line, file=sys.stderr, flush=True)

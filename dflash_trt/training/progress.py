"""How training reports itself: one line now and then, with the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

Progress = Callable[[str, int, int, float], None]
"""(what, steps done, steps in all, loss)"""


class Printer:
    """Prints every `every` steps and at the end of a stretch, to stderr."""

    def __init__(self, every: int = 25) -> None:
        self.every = every
        self.what = ""
        self.started = 0.0

    def __call__(self, what: str, done: int, total: int, loss: float) -> None:
        if what != self.what:
            self.what, self.started = what, time.monotonic()
        if done % self.every and done != total:
            return
        spent = time.monotonic() - self.started
        left = spent / done * (total - done)
        print(
            f"{what}: {done}/{total}, loss {loss:.3f}, {spent:.0f} s, {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )

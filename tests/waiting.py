"""Waiting in tests for what must come.

A machine may be busy with other things, and a wait that succeeds early costs nothing: how long it
may take says nothing about the code. What must *not* come is shown by what comes instead, or by
a state that cannot be left, never by a short wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 180.0


def wait_until(condition: Callable[[], bool], what: str = "what was waited for") -> None:
    """Returns once `condition` holds; fails the test, with `what`, when it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {PATIENCE_S:g} s"
        time.sleep(0.005)

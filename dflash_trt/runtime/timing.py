"""Measures how long pieces of work take."""

from __future__ import annotations

from collections.abc import Callable


class Stopwatch:
    """Adds the seconds of every `with` block to `seconds`, also of one that raises."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = 0.0
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._started = self._clock()

    def __exit__(self, *error: object) -> None:
        self.seconds += self._clock() - self._started

"""An event loop in whose time nothing takes any: only sleeping moves the clock, and exactly."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Skipping(selectors.SelectSelector):
    """Waits for no file; the clock jumps to the next thing that is due instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits, and nothing will ever happen"
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualTime:
    """A clock and its event loop; `run` is asyncio's, and `perf_counter` is time's."""

    def __init__(self) -> None:
        self._selector = _Skipping()

    def perf_counter(self) -> float:
        """Seconds since its making."""
        return self._selector.now

    def process_time(self) -> float:
        """No work takes any."""
        return 0.0

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        loop = asyncio.SelectorEventLoop(self._selector)
        loop.time = self.perf_counter  # type: ignore[method-assign]
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(main)

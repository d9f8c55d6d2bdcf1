"""TensorRT's callbacks: nested build phases as one bar, and the engine's bytes as they come.

TensorRT swallows what a callback raises and reports success, a failed write and Ctrl-C included. So
each keeps the exception for `check` to raise once the builder has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

# The bar's length: nested phases share out their parent's step.
TOTAL_STEPS = 1000


class _Callback:
    """What a callback raised first, to be raised by `check`."""

    error: BaseException | None = None

    @contextmanager
    def keep(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = self.error or error

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def make_monitor(trt: Any, advance: Callable[[int], None]) -> Any:
    """An IProgressMonitor that calls `advance`, in all with at most TOTAL_STEPS."""

    class Monitor(_Callback, trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._lock = threading.Lock()  # TensorRT may call from several threads
            self._shown = 0
            # By phase: where on the bar its next step begins, and the length of a step.
            self._phases: dict[str, tuple[float, float]] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            with self.keep(), self._lock:
                low, width = self._phases.get(parent or "", (0.0, float(TOTAL_STEPS)))
                self._phases[name] = low, width / max(1, steps)

        def phase_finish(self, name: str) -> None:
            with self.keep(), self._lock:
                self._phases.pop(name, None)

        def step_complete(self, name: str, _step: int) -> bool:
            with self.keep(), self._lock:
                if name in self._phases:
                    low, width = self._phases[name]
                    self._phases[name] = low + width, width
                    reached = min(TOTAL_STEPS, int(round(low + width, 6)))
                    if reached > self._shown:
                        advance(reached - self._shown)
                        self._shown = reached
            return self.error is None

    return Monitor()


def make_writer(trt: Any, file: BinaryIO) -> Any:
    """An IStreamWriter into `file`."""

    class Writer(_Callback, trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

        def write(self, data: bytes) -> int:
            with self.keep():
                if self.error is None:
                    return file.write(data)
            return 0

    return Writer()

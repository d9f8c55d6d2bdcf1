"""TensorRT's callbacks: nested build phases as one bar, and the engine's bytes as they come.

TensorRT swallows what a callback raises and reports success, a failed write included. So each
keeps the exception for `check` to raise once the builder has returned. Signals are held as long.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, BinaryIO

# The bar's length: nested phases share out their parent's step.
TOTAL_STEPS = 1000

HELD = (signal.SIGINT, signal.SIGTERM)


class HeldSignals:
    """The first signal that arrived, or None."""

    number: int | None = None


@contextmanager
def held_signals() -> Iterator[HeldSignals]:
    """Delivers SIGINT and SIGTERM when the context ends; a second of them kills.

    Python would raise them inside a callback of the builder, where TensorRT swallows them.
    """
    held = HeldSignals()
    if threading.current_thread() is not threading.main_thread():  # it alone handles signals
        yield held
        return

    def hold(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        held.number = held.number or number

    ignored = [number for number in HELD if signal.getsignal(number) is signal.SIG_IGN]
    before = {number: signal.signal(number, hold) for number in HELD if number not in ignored}
    try:
        yield held
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held.number is not None:
            signal.raise_signal(held.number)


class _Callback:
    """What a callback raised, to be raised by `check`."""

    error: BaseException | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def make_monitor(trt: Any, advance: Callable[[int], None], held: HeldSignals) -> Any:
    """An IProgressMonitor that calls `advance`, in all with at most TOTAL_STEPS.

    A signal in `held` stops the build too, and is for whoever holds it to deliver.
    """

    class Monitor(_Callback, trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._lock = threading.Lock()  # TensorRT may call from several threads
            self._shown = 0
            # By phase: where on the bar its next step begins, and the length of a step.
            self._phases: dict[str, tuple[float, float]] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            with self._lock:
                low, width = self._phases.get(parent or "", (0.0, float(TOTAL_STEPS)))
                self._phases[name] = low, width / max(1, steps)

        def phase_finish(self, name: str) -> None:
            with self._lock:
                self._phases.pop(name, None)

        def step_complete(self, name: str, _step: int) -> bool:
            try:
                with self._lock:
                    self._complete_step(name)
            except BaseException as error:
                self.error = error
            return self.error is None and held.number is None

        def _complete_step(self, name: str) -> None:
            if name not in self._phases:
                return
            low, width = self._phases[name]
            self._phases[name] = low + width, width
            reached = min(TOTAL_STEPS, round(low + width, 6) // 1)
            if reached > self._shown:
                advance(int(reached) - self._shown)
                self._shown = int(reached)

    return Monitor()


def make_writer(trt: Any, file: BinaryIO) -> Any:
    """An IStreamWriter into `file`."""

    class Writer(_Callback, trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

        def write(self, data: bytes) -> int:
            if self.error is not None:
                return 0
            try:
                return file.write(data)
            except BaseException as error:
                self.error = error
                return 0

    return Writer()

"""TensorRT's callbacks: nested build phases as one bar, and the engine's bytes as they come.

TensorRT swallows what a callback raises and reports success, a failed write included. So each
keeps the exception for `check` to raise once the builder has returned. Signals are held as long.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, BinaryIO

# The bar's length: nested phases share out their parent's step.
TOTAL_STEPS = 1000

HELD = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class _Phase:
    low: float
    step: float
    done: int = 0


class PhaseProgress:
    """Turns nested phases into increments that add up to at most TOTAL_STEPS."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance = advance
        self._phases: dict[str, _Phase] = {}
        self._shown = 0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        low, width = 0.0, float(TOTAL_STEPS)
        if parent in self._phases:
            outer = self._phases[parent]
            low, width = outer.low + outer.done * outer.step, outer.step
        self._phases[name] = _Phase(low, width / max(1, steps))

    def complete_step(self, name: str) -> None:
        phase = self._phases.get(name)
        if phase is None:
            return
        phase.done += 1
        reached = min(TOTAL_STEPS, int(phase.low + phase.done * phase.step))
        if reached > self._shown:
            self._advance(reached - self._shown)
            self._shown = reached

    def finish(self, name: str) -> None:
        self._phases.pop(name, None)


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


def make_monitor(trt: Any, advance: Callable[[int], None], held: HeldSignals) -> Any:
    """An IProgressMonitor that calls `advance`; its `check` raises what stopped the build.

    A signal in `held` stops it too, and is for whoever holds it to deliver.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._phases = PhaseProgress(advance)
            self._lock = threading.Lock()  # TensorRT may call from several threads
            self._error: BaseException | None = None

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            with self._lock:
                self._phases.start(name, parent, steps)

        def phase_finish(self, name: str) -> None:
            with self._lock:
                self._phases.finish(name)

        def step_complete(self, name: str, _step: int) -> bool:
            try:
                with self._lock:
                    self._phases.complete_step(name)
            except BaseException as error:
                self._error = error
            return self._error is None and held.number is None

        def check(self) -> None:
            if self._error is not None:
                raise self._error

    return Monitor()


def make_writer(trt: Any, file: BinaryIO) -> Any:
    """An IStreamWriter into `file`; its `check` raises the write that failed."""

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self._error: BaseException | None = None

        def write(self, data: bytes) -> int:
            if self._error is not None:
                return 0
            try:
                return file.write(data)
            except BaseException as error:
                self._error = error
                return 0

        def check(self) -> None:
            if self._error is not None:
                raise self._error

    return Writer()

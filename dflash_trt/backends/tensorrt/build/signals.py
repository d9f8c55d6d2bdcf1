"""Ctrl-C and SIGTERM while TensorRT builds: kept until its code has returned."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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

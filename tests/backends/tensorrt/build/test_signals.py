"""A signal during a build stops it at its next step and arrives once TensorRT has returned."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from dflash_trt.backends.tensorrt.build.monitor import make_monitor
from dflash_trt.backends.tensorrt.build.signals import HeldSignals, held_signals


def test_a_signal_waits_for_the_end() -> None:
    before = signal.getsignal(signal.SIGINT)
    reached = False
    with pytest.raises(KeyboardInterrupt), held_signals() as held:
        signal.raise_signal(signal.SIGINT)
        assert held.number == signal.SIGINT
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is before


def test_no_signal_no_change() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with held_signals() as held:
        assert held.number is None
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_monitor_stops_at_a_held_signal() -> None:
    class Base:
        pass

    held = HeldSignals()
    monitor = make_monitor(SimpleNamespace(IProgressMonitor=Base), lambda count: None, held)
    monitor.phase_start("build", None, 2)
    assert monitor.step_complete("build", 0)
    held.number = signal.SIGTERM
    assert not monitor.step_complete("build", 1)
    monitor.check()

"""Nested phases as one bar, and signals that wait until TensorRT has returned."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from dflash_trt.backends.tensorrt.build.monitor import (
    TOTAL_STEPS,
    HeldSignals,
    PhaseProgress,
    held_signals,
    make_monitor,
)


def test_phases_share_out_their_parents_step() -> None:
    shown: list[int] = []
    phases = PhaseProgress(shown.append)
    phases.start("build", None, 2)
    phases.start("clone", "build", 4)
    phases.complete_step("clone")
    assert sum(shown) == TOTAL_STEPS // 8
    for _ in range(3):
        phases.complete_step("clone")
    phases.finish("clone")
    phases.complete_step("build")
    assert sum(shown) == TOTAL_STEPS // 2
    phases.start("optimise", "build", 2)
    phases.complete_step("optimise")
    phases.complete_step("unheard of")
    assert sum(shown) == TOTAL_STEPS * 3 // 4
    phases.complete_step("build")
    assert sum(shown) == TOTAL_STEPS


def test_a_bar_never_goes_back_and_never_past_its_end() -> None:
    shown: list[int] = []
    phases = PhaseProgress(shown.append)
    phases.start("build", None, 0)
    for _ in range(3):
        phases.complete_step("build")
    phases.start("late", "build", 1)
    phases.complete_step("late")
    assert all(count > 0 for count in shown)
    assert sum(shown) == TOTAL_STEPS


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

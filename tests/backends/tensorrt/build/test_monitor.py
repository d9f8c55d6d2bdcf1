"""Nested phases as one bar, and signals that wait until TensorRT has returned."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.backends.tensorrt.build.monitor import (
    TOTAL_STEPS,
    HeldSignals,
    held_signals,
    make_monitor,
)


def monitor(shown: list[int], held: HeldSignals | None = None) -> Any:
    trt = SimpleNamespace(IProgressMonitor=object)
    return make_monitor(trt, shown.append, held or HeldSignals())


def test_phases_share_out_their_parents_step() -> None:
    """A bar never goes back, and never past its end."""
    shown: list[int] = []
    phases = monitor(shown)
    phases.phase_start("build", None, 2)
    phases.phase_start("clone", "build", 4)
    reached = {"clone": [1, 2, 3, 4], "build": [4]}
    for name, eighths in reached.items():
        for eighth in eighths:
            assert phases.step_complete(name, 0) and sum(shown) == TOTAL_STEPS * eighth // 8
    phases.phase_finish("clone")
    phases.phase_start("optimise", "build", 2)
    for name in ("optimise", "unheard of"):
        phases.step_complete(name, 0)
        assert sum(shown) == TOTAL_STEPS * 3 // 4
    for _ in range(2):
        phases.step_complete("build", 0)
        assert sum(shown) == TOTAL_STEPS
    assert all(count > 0 for count in shown)


def test_a_signal_waits_for_the_end() -> None:
    before = signal.getsignal(signal.SIGINT)
    reached = False
    with pytest.raises(KeyboardInterrupt), held_signals() as held:
        phases = monitor([], held)
        phases.phase_start("build", None, 2)
        assert phases.step_complete("build", 0)
        signal.raise_signal(signal.SIGINT)
        assert held.number == signal.SIGINT and not phases.step_complete("build", 1)
        phases.check()
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is before

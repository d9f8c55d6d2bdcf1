"""Nested phases as one bar, and exceptions that wait until TensorRT has returned."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.backends.tensorrt.build.monitor import TOTAL_STEPS, make_monitor, make_writer

TRT = SimpleNamespace(IProgressMonitor=object, IStreamWriter=object)


def monitor(advance: Callable[[int], None]) -> Any:
    return make_monitor(TRT, advance)


def test_phases_share_out_their_parents_step() -> None:
    """A bar never goes back, and never past its end."""
    shown: list[int] = []
    phases = monitor(shown.append)
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


def test_what_a_callback_raises_waits_for_the_end() -> None:
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    phases = monitor(interrupt)
    phases.phase_start("build", None, 2)
    assert not phases.step_complete("build", 0)
    with pytest.raises(KeyboardInterrupt):
        phases.check()
    file = io.BytesIO()
    file.close()
    writer = make_writer(TRT, file)
    assert writer.write(b"x") == 0
    with pytest.raises(ValueError, match="closed"):
        writer.check()

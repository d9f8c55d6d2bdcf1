"""Nested phases as one bar."""

from __future__ import annotations

from dflash_trt.backends.tensorrt.build.monitor import TOTAL_STEPS, PhaseProgress


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

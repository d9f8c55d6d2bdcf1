"""A seeded sample of the hostile inputs every day, half of them of another seed in the long run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.judge import Ending, HostileCase, find_fault

ROOT = Path(__file__).parents[2]
LINE = "error: pair.yaml: is not UTF-8 at byte 3\n"


@pytest.mark.parametrize(
    ("seed", "share", "jobs"),
    [(20, "0.015", "1"), pytest.param(21, "0.5", "2", marks=pytest.mark.exhaustive)],
)
def test_hostile_inputs_of_each_kind(seed: int, share: str, jobs: str) -> None:
    """`python -m tests.hostile` runs all."""
    command = [sys.executable, "-m", "tests.hostile", "--seed", str(seed), "--share", share]
    done = subprocess.run([*command, "--jobs", jobs], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " inputs, 0 faults" in done.stdout


@pytest.mark.parametrize(
    ("code", "out", "err", "fault"),
    [
        (1, "", LINE, None),
        (0, "wrong", "", "another text"),
        (None, "", "", "exit code None"),
        (1, "", "Traceback (most recent call last):\n" + LINE, "Traceback"),
    ],
)
def test_endings_are_judged(code: int | None, out: str, err: str, fault: str | None) -> None:
    case = HostileCase("a", (), lambda folder: None, (("build",),), is_intact=True)
    found = find_fault(case, Ending(code, out, err, 1.0, 1 << 20), "right")
    assert found == fault if fault is None else found is not None and fault in found

"""A seeded sample of the hostile inputs every day, half of them of another seed in the long run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.case import SECRET, Ending, HostileCase, find_fault
from tests.hostile.kinds import KINDS, case_names, make_case

ROOT = Path(__file__).parents[2]
SEED, LEAST = 20, 1500


def _run(*options: str) -> int:
    """The number of inputs that ended as they may; the others fail the test by their names."""
    command = [sys.executable, "-m", "tests.hostile", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^([\d,]+) inputs, 0 faults", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    return int(found[1].replace(",", ""))


def test_some_hostile_inputs_of_each_kind() -> None:
    assert _run("--seed", str(SEED), "--share", "0.015", "--jobs", "1") > LEAST * 0.015


@pytest.mark.exhaustive
def test_half_of_the_hostile_inputs() -> None:
    """Of another seed; `python -m tests.hostile` runs all."""
    assert _run("--seed", str(SEED + 1), "--share", "0.5", "--jobs", "2") > LEAST / 2


def test_an_input_is_found_again() -> None:
    """By seed, kind and number: the same commands, and the same sample."""
    names = case_names(3, 0.1, KINDS)
    assert names == case_names(3, 0.1, KINDS)
    for name in names:
        assert make_case(name).about == make_case(name).about
        assert make_case(name).commands == make_case(name).commands


QUIET = HostileCase("a", (), lambda folder: None, (("build",),), is_intact=True)
LINE = "error: pair.yaml: is not UTF-8 at byte 3\n"


def _ending(code: int | None = 1, err: str = LINE, **more: object) -> Ending:
    facts = {"signal": 0, "out": "", "seconds": 1.0, "max_bytes": 1 << 20, **more}
    return Ending(code=code, err=err, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ending", "fault"),
    [
        (_ending(), None),
        (_ending(0, "note: a\n", out="right"), None),
        (_ending(0, "", out="wrong"), "another text"),
        (_ending(None, "", signal=9), "signal 9"),
        (_ending(130, ""), "exit code 130"),
        (_ending(1, ""), "0 error lines"),
        (_ending(1, LINE + LINE), "2 error lines"),
        (_ending(0, LINE), "1 error lines"),
        (_ending(1, "Traceback (most recent call last):\n" + LINE), "Traceback"),
        (_ending(0, "[W:onnxruntime:x] y\n", out="right"), "onnxruntime"),
        (_ending(1, "whatever\n" + LINE), "'whatever'"),
        (_ending(1, "error: \x1b[31m\n"), "characters"),
        (_ending(1, f"error: {'x' * 1300}\n"), "1307 characters"),
        (_ending(seconds=21.0), "21.0 s"),
        (_ending(max_bytes=3 << 30), "3,072 MiB"),
        (_ending(left=["input/out/b"]), "left input/out/b"),
        (_ending(0, "", out="right", copied=["input/out/x"]), "copied the secret"),
        (_ending(1, f"error: {SECRET}\n"), "says the secret"),
    ],
)
def test_endings_are_judged(ending: Ending, fault: str | None) -> None:
    found = find_fault(QUIET, ending, "right")
    assert found == fault if fault is None else found is not None and fault in found

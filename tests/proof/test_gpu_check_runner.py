"""Parts of the GPU check in processes of their own, which end in every way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.errors import DflashError
from dflash_trt.proof.gpu_check import runner
from dflash_trt.proof.gpu_check.gpu_record import OutOfTimeError, PartSkippedError, Probe
from dflash_trt.proof.gpu_check.runner import (
    PartWork,
    Setting,
    run_here,
    run_in_child,
)

FOUND = Probe("first", True, "fine", {"worst": np.float32("nan")})


def finds(setting: Setting) -> Iterator[Probe]:
    yield FOUND


def dies(setting: Setting) -> Iterator[Probe]:
    yield FOUND
    print("the last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(setting: Setting) -> Iterator[Probe]:
    yield FOUND
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def _setting(folder: Path, seconds: float = 100.0) -> Setting:
    return Setting(folder, time.monotonic() + seconds)


def test_a_child_that_ends_well_leaves_strict_json(tmp_path: Path) -> None:
    outcome = run_in_child(finds, _setting(tmp_path))
    assert (outcome.status, outcome.reason, outcome.passed) == ("done", None, True)
    assert [one.figures for one in outcome.probes] == [{"worst": "nan"}]


def test_a_child_that_dies_leaves_what_it_found_and_how_it_died(tmp_path: Path) -> None:
    outcome = run_in_child(dies, _setting(tmp_path))
    assert (outcome.status, outcome.passed) == ("died", False)
    assert outcome.reason == (
        "its process died (SIGSEGV) after 'first': Fatal Python error: Segmentation fault"
    )
    assert "the last words" in outcome.log and [one.name for one in outcome.probes] == ["first"]


def test_a_child_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.0)
    found = tmp_path / "found.jsonl"
    real = BaseProcess.join

    def join(self: BaseProcess, timeout: float | None = None) -> None:
        """Time passes until something was found; then it is up."""
        while timeout is not None and not found.read_text():
            real(self, 0.01)
        real(self, timeout)

    monkeypatch.setattr(BaseProcess, "join", join)
    outcome = run_in_child(hangs, _setting(tmp_path, 0.2))
    assert (outcome.status, outcome.reason) == ("no answer", "it was ended after 'first'")
    assert outcome.passed is False and outcome.seconds < 60
    assert not outcome.was_stopped


def test_ctrl_c_ends_the_child_and_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, real = tmp_path / "found.jsonl", BaseProcess.join
    children: list[BaseProcess] = []

    def join(self: BaseProcess, timeout: float | None = None) -> None:
        children.append(self)
        real(self, timeout)
        if timeout == runner.POLL_SECONDS and found.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(BaseProcess, "join", join)
    outcome = run_in_child(hangs, _setting(tmp_path))
    assert isinstance(outcome.stop, KeyboardInterrupt)
    assert outcome.status == "interrupted" and len(outcome.probes) == 1
    assert children[0].exitcode == -signal.SIGKILL


def test_words_that_were_cut_are_not_read(tmp_path: Path) -> None:
    found = tmp_path / "found.jsonl"
    found.write_text('{"name": "a", "passed": null, "detail": "", "figures": {}}\n{"name": "b')
    outcome = runner._read(found)
    assert (outcome.status, [one.name for one in outcome.probes]) == ("died", ["a"])


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (PartSkippedError("no library"), "skipped", "no library"),
        (OutOfTimeError("the other cases"), "out of time", "the other cases"),
        (DflashError("broken", fix="mend it"), "failed", "broken; mend it"),
        (ZeroDivisionError("x\ny"), "failed", "ZeroDivisionError: x y"),
    ],
)
def test_what_stops_a_part_is_how_it_ended(
    tmp_path: Path, error: Exception, status: str, reason: str
) -> None:
    def part(setting: Setting) -> Iterator[Probe]:
        yield FOUND
        raise error

    work: PartWork = part
    seen: list[Any] = []
    outcome = run_here(work, _setting(tmp_path), seen.append)
    assert (outcome.status, outcome.reason) == (status, reason) and seen == outcome.probes
    assert outcome.passed is (status != "failed")

"""Parts of the GPU check in processes of their own, which end in every way."""

from __future__ import annotations

import multiprocessing
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


@pytest.fixture
def hears(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[BaseException]:
    """Waiting for a child ends when it has found something; with the error that is put in here."""
    stop: list[BaseException] = []
    found, real = tmp_path / "found.jsonl", BaseProcess.join

    def join(self: BaseProcess, timeout: float | None = None) -> None:
        while timeout != runner.KILL_SECONDS and not found.read_text():
            real(self, 0.01)
        if stop:
            raise stop.pop()
        real(self, 0.01 if timeout != runner.KILL_SECONDS else timeout)

    monkeypatch.setattr(BaseProcess, "join", join)
    return stop


def test_a_child_that_hangs_is_ended(tmp_path: Path, hears: list[BaseException]) -> None:
    outcome = run_in_child(hangs, _setting(tmp_path))
    assert (outcome.status, outcome.passed) == ("died", False)
    assert outcome.reason == "it gave no answer and was ended after 'first'"
    hears.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_in_child(hangs, _setting(tmp_path))
    assert not multiprocessing.active_children()


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

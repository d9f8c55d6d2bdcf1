"""Parts of the GPU check in processes of their own, which end in every way."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.core.progress import SilentProgress
from dflash_trt.errors import DflashError
from dflash_trt.proof.gpu_check import check, runner
from dflash_trt.proof.gpu_check import gpu_record as record
from dflash_trt.proof.gpu_check.check import Part
from dflash_trt.proof.gpu_check.gpu_record import (
    OutOfTimeError,
    PartOutcome,
    PartSkippedError,
    Probe,
)
from dflash_trt.proof.gpu_check.runner import (
    PartWork,
    Setting,
    run_here,
    run_in_child,
)
from tests.cli.conftest import Run
from tests.standins.cuda import FakeCuda

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


class PartHere:
    """A part in this process, which has ended when it has begun."""

    def __init__(self, work: PartWork, seconds: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._outcome = run_here(work, Setting(Path(folder), time.monotonic() + seconds))

    def is_over(self, wait: float) -> bool:
        return True

    def end(self) -> PartOutcome:
        return self._outcome


def run_parts_here(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(check, "PartProcess", PartHere)
    patch.setattr(check, "run_in_child", lambda work, seconds: PartHere(work, seconds).end())


def test_a_child_that_ends_well_leaves_strict_json() -> None:
    outcome = run_in_child(finds, 100)
    assert (outcome.status, outcome.reason, outcome.passed) == ("done", None, True)
    assert [one.figures for one in outcome.probes] == [{"worst": "NaN"}]


def test_a_child_that_dies_leaves_what_it_found_and_how_it_died() -> None:
    outcome = run_in_child(dies, 100)
    assert (outcome.status, outcome.passed) == ("died", False)
    assert outcome.reason == (
        "its process died (SIGSEGV) after 'first': Fatal Python error: Segmentation fault"
    )
    assert "the last words" in outcome.log and [one.name for one in outcome.probes] == ["first"]


@pytest.fixture
def hears(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[BaseException]:
    """Waiting for a child ends when it has found something; with the error that is put in here."""
    stop: list[BaseException] = []
    real = BaseProcess.join
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def join(self: BaseProcess, timeout: float | None = None) -> None:
        found = tmp_path.glob("*/found.jsonl")
        while timeout != runner.KILL_SECONDS and not any(one.read_text() for one in found):
            real(self, 0.01)
            found = tmp_path.glob("*/found.jsonl")
        if stop:
            raise stop.pop()
        real(self, 0.01 if timeout != runner.KILL_SECONDS else timeout)

    monkeypatch.setattr(BaseProcess, "join", join)
    return stop


def test_a_child_that_hangs_is_ended(tmp_path: Path, hears: list[BaseException]) -> None:
    others = {*multiprocessing.active_children()}  # of other tests
    outcome = run_in_child(hangs, -runner.GRACE_SECONDS)  # late when it is heard
    assert (outcome.status, outcome.passed) == ("died", False)
    assert outcome.reason == "it gave no answer and was ended after 'first'"
    hears.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_in_child(hangs, 100)
    assert others.issuperset(multiprocessing.active_children()) and not [*tmp_path.iterdir()]


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
    outcome = run_here(work, Setting(tmp_path, time.monotonic() + 100), seen.append)
    assert (outcome.status, outcome.reason) == (status, reason) and seen == outcome.probes
    assert outcome.passed is (status != "failed")


pytest.importorskip("cuda.bindings", reason="the rtx extra is not installed")


class Bench:
    """Parts of the check that do as told, and how often each was run."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.fault: BaseException | None = None

    def parts(self) -> list[Part]:
        return [
            Part(name, 30, lambda setting, name=name: self.find(name, setting))
            for name in ("CUDA", "kernels: accept", "TensorRT-RTX: demo pair", "speed: accept")
        ]

    def find(self, name: str, setting: Setting) -> Iterator[Probe]:
        assert setting.folder.is_dir()
        self.runs.append(name)
        if name.startswith("TensorRT-RTX"):
            raise PartSkippedError("TensorRT-RTX has no sm_90")
        yield Probe("device memory is aligned for TensorRT", True, "all | is")
        if name.startswith("kernels") and self.fault is not None:
            yield Probe("accept, 1 rows", False, "bonus differ")
            raise self.fault
        if name.startswith("speed"):
            yield Probe("time of accept", None, "2 µs", {"s": 2e-6})
            if setting.ends < time.monotonic() + 1000:
                raise OutOfTimeError("the other points are left to --only")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """On a Hopper GPU, every part in this process."""
    bench, cuda = Bench(), FakeCuda(arch=(9, 0))
    monkeypatch.setattr("dflash_trt.hardware.device.load_cuda", lambda: cuda)
    run_parts_here(monkeypatch)
    monkeypatch.setattr(check, "check_parts", bench.parts)
    return bench


def read(folder: Path) -> Any:
    return json.loads((folder / "record.json").read_text())


def test_a_record_and_its_page(run: Run, bench: Bench, tmp_path: Path) -> None:
    """A GPU that one library does not know is no failure."""
    folder = tmp_path / "some" / "record"
    outcome = run.well("doctor", "--gpu-check", "-o", folder)
    found = read(folder)
    assert found["passed"] is True and found["machine"]["gpu"]["arch"] == "sm_90"
    assert found["machine"]["libraries"]["cuda-python"]
    assert {name: (part["status"], part["passed"]) for name, part in found["parts"].items()} == {
        "CUDA": ("done", True),
        "kernels: accept": ("done", True),
        "TensorRT-RTX: demo pair": ("skipped", None),
        "speed: accept": ("out of time", True),
    }
    assert found["unfinished"] == ["speed: accept"]
    lines = outcome.out.splitlines()
    assert lines[0] == (
        "Stand-in GPU (sm_90), 1.1 GB, CUDA 13.4: all that ran is as it should be; "
        "1 parts are unfinished"
    )
    assert "     TensorRT-RTX (1): skipped: TensorRT-RTX has no sm_90" in lines
    page = (folder / "record.md").read_text()
    assert "# GPU check: Stand-in GPU, 20" in page and outcome.out.split("\n/")[0] in page
    assert "- time of accept: 2 µs" in page
    assert sorted(path.name for path in folder.iterdir()) == ["record.json", "record.md"]


def test_it_goes_on_where_it_was(run: Run, bench: Bench, tmp_path: Path) -> None:
    run.well("doctor", "--gpu-check", "-o", tmp_path)
    before, bench.runs = bench.runs, []
    assert len(before) == 4
    outcome = run.well("doctor", "--gpu-check", "-o", tmp_path, "--json")
    assert not bench.runs and outcome.json == read(tmp_path), "more of the same time tells no more"
    said = run.well("doctor", "--gpu-check", "-o", tmp_path).out
    assert "\n--only NAME takes the time" in said and "the same command" not in said
    run.well("doctor", "--gpu-check", "-o", tmp_path, "--only", "speed")
    assert bench.runs == ["speed: accept"] and not read(tmp_path)["unfinished"]


def test_parts_by_name_are_run_again(run: Run, bench: Bench, tmp_path: Path) -> None:
    run.well("doctor", "--gpu-check", "-o", tmp_path)
    bench.runs, bench.fault = [], ZeroDivisionError("twice the same")
    names = [("--only", "speed: accept"), ("--only", "kernels: accept")]
    assert run("doctor", "--gpu-check", "-o", tmp_path, *names[0], *names[1]).code == 1
    assert bench.runs == ["kernels: accept", "speed: accept"]
    parts = read(tmp_path)["parts"]
    assert len(parts) == 4 and parts["kernels: accept"]["status"] == "failed"
    bench.runs = []
    run("doctor", "--gpu-check", "-o", tmp_path, "--only", "kernel: accept").fails(
        2, "--only: no step is called 'kernel: accept' (nearest: 'kernels: accept')"
    )
    assert not bench.runs
    run("doctor", "--only", "CUDA").fails(2, "--only: is for --gpu-check")


def test_parts_run_beside_each_other_but_those_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Seven minutes in all; what is ended, or has no time left, ends no other."""
    beside, lasting, now = list[set[str]](), dict[str, int](), [0.0]

    class Lasting(PartHere):
        def __init__(self, work: Any, seconds: float) -> None:
            self._name, self._ends = work, now[0] + min(seconds, 30)
            lasting[self._name] = seconds
            beside.append({*lasting})

        def is_over(self, wait: float) -> bool:
            now[0] += 1
            return now[0] >= self._ends

        def end(self) -> PartOutcome:
            del lasting[self._name]
            return PartOutcome("done")

    monkeypatch.setattr(check, "PartProcess", Lasting)
    monkeypatch.setattr(check, "available_cores", lambda: 5)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(record.CheckRecord, "save", lambda *_: None)
    kept, names = record.CheckRecord({}, "", ""), "ABCDEFGHI"
    parts: Any = [Part(one, 60, one, one in "AGHI") for one in names]
    check._run(parts, kept, tmp_path, SilentProgress(), 160)
    assert beside[0] == {"A"} and max(map(len, beside)) == 3
    assert all(len(one) == 1 for one in beside if one & {*"AGH"})
    assert [kept.parts[one].status for one in names] == ["done"] * 8 + ["not run"]
    assert not lasting
    ended = check.BUDGET_SECONDS + runner.GRACE_SECONDS + runner.KILL_SECONDS
    assert ended <= 7 * 60


def test_what_is_wrong_is_said(run: Run, bench: Bench, tmp_path: Path) -> None:
    bench.fault = ZeroDivisionError("half-way")
    outcome = run("doctor", "--gpu-check", "-o", tmp_path)
    assert outcome.code == 1 and bench.runs[-1] == "speed: accept", "one part ends no other"
    assert "no   kernels: accept: failed: ZeroDivisionError: half-way (2 findings, 1" in outcome.out
    assert "       no  accept, 1 rows: bonus differ" in outcome.out


def test_ctrl_c_keeps_what_was_found(run: Run, bench: Bench, tmp_path: Path) -> None:
    bench.fault = KeyboardInterrupt()
    outcome = run("doctor", "--gpu-check", "-o", tmp_path)
    assert outcome.code == 128 + signal.SIGINT
    assert f"{tmp_path} has what was found; the same command goes on from there" in outcome.err
    assert list(read(tmp_path)["parts"]) == ["CUDA"]
    bench.runs, bench.fault = [], None
    run.well("doctor", "--gpu-check", "-o", tmp_path)
    assert bench.runs == ["kernels: accept", "TensorRT-RTX: demo pair", "speed: accept"]


def test_records_are_not_mixed(
    run: Run, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.well("doctor", "--gpu-check", "-o", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(record, "source_hash", lambda: "another")
        run("doctor", "--gpu-check", "-o", tmp_path).fails(
            2, "is the record of another machine, other versions or other code", "another -o"
        )
    for broken in ("{", "[]", '{"parts": {"a": {}}}'):
        (tmp_path / "record.json").write_text(broken)
        run("doctor", "--gpu-check", "-o", tmp_path).fails(2, "is not a record of this check")
    (tmp_path / "record.json").unlink()
    os.mkfifo(tmp_path / "record.json")
    run("doctor", "--gpu-check", "-o", tmp_path).fails(2, "record.json: is a pipe")


def test_without_a_gpu(
    run: Run, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trt.hardware.device.load_cuda", lambda: FakeCuda(count=0))
    folder = tmp_path / "record"
    line = run("doctor", "--gpu-check", "-o", folder).fails(1, "no CUDA device: none is visible")
    assert "--gpu-check is for an NVIDIA GPU" in line
    assert not folder.exists() and not bench.runs
    monkeypatch.setattr(check, "run_in_child", lambda work, seconds: PartOutcome("died", "it died"))
    run("doctor", "--gpu-check", "-o", folder).fails(1, "the GPU does not answer: it died; nvidia")
    run("doctor", "-o", folder).fails(2, "--output: is for --gpu-check")

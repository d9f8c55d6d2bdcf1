"""`build --precision`, interrupted: nothing is left that looks like a bundle."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.waiting import PATIENCE_S

FP8 = ["--precision", "fp8"]
# Runs in a process of its own: waits at the stage named, until it is killed.
WAITING_BUILD = """
import sys, time
from dflash_trt.cli.main import main
from dflash_trt.cli.progress import StageBars

real = StageBars.stage

def stage(self, name, *more):
    real(self, name, *more)
    if name.startswith(sys.argv[1]):
        print("waiting", flush=True)
        time.sleep(3600)

StageBars.stage = stage
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def start(own_pair: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a build of `own_pair` in FP8 and waits until it has reached a stage."""
    running: list[subprocess.Popen[str]] = []

    def call(stage: str, output: Path) -> subprocess.Popen[str]:
        command = ["build", "--target", str(own_pair), *FP8, "-o", str(output)]
        process = subprocess.Popen(
            [sys.executable, "-c", WAITING_BUILD, stage, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None and process.stdout.readline() == "waiting\n"
        return process

    yield call
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("stage", ["observing", "draft: quantizing"])
def test_a_kill_leaves_no_bundle_and_the_next_build_sweeps(
    run: Run,
    own_pair: Path,
    tmp_path: Path,
    start: Callable[..., subprocess.Popen[str]],
    stage: str,
) -> None:
    output = tmp_path / "out" / "b"
    process = start(stage, output)
    process.kill()
    process.wait()
    (left,) = output.parent.iterdir()
    assert left.name.startswith(".b.building-") and (left / "quantized").is_dir()
    assert run("build", "--target", own_pair, *FP8, "-o", output).code == 0
    assert [path.name for path in output.parent.iterdir()] == ["b"]


@pytest.mark.parametrize("stage", ["observing", "target: quantizing"])
def test_a_polite_kill_leaves_nothing(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], stage: str
) -> None:
    process = start(stage, tmp_path / "out" / "b")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert not (tmp_path / "out").exists()

"""`build --precision` that fails or is interrupted: one line, and nothing that looks like a bundle.

Options that do not go together, and texts that cannot be read, are refusals of tests/frozen.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Build
from tests.quantization.running import quantize_in_place
from tests.waiting import PATIENCE_S

FP8 = ["--precision", "fp8"]
Start = Callable[[str, Path], subprocess.Popen[str]]
# Runs in a process of its own: waits at the stage named, until it is killed.
WAITING_BUILD = """
import sys, time
from dflash_trt.cli.main import main
from dflash_trt.cli.bars import StageBars

real = StageBars.stage

def stage(self, name, *more):
    real(self, name, *more)
    if name.startswith(sys.argv[1]):
        print("waiting", flush=True)
        time.sleep(3600)

StageBars.stage = stage
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("owner", "fix"),
    [("target", "leave out --precision"), ("draft", "add --draft-precision bf16")],
)
def test_what_is_quantised_already(build: Build, own_pair: Path, owner: str, fix: str) -> None:
    folder = quantize_in_place(own_pair, owner)
    build(own_pair, *FP8).fails(1, f"{folder}: is quantized already", fix)


def test_a_failed_write_is_about_the_bundle(
    build: Build, own_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dflash_trt.quantization.tensor_rows.ShardWriter.write", fail)
    pieces = (f"{build.folder}: ", "No space left on device", "nothing was left behind")
    build(own_pair, *FP8).fails(1, *pieces)


@pytest.fixture
def start(own_pair: Path) -> Iterator[Start]:
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


def test_a_polite_kill_leaves_nothing(tmp_path: Path, start: Start) -> None:
    process = start("target: quantizing", tmp_path / "out" / "b")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert not (tmp_path / "out").exists()

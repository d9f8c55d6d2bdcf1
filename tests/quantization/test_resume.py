"""Interrupted runs: what a kill leaves, what the next run makes of it, and what errors leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoints.target import TargetSpec, read_target
from dflash_trt.errors import DflashError
from dflash_trt.quantization.linears import Algorithm
from dflash_trt.quantization.partial import partial_checkpoint, partial_folder
from dflash_trt.quantization.scales import Activations
from tests.quantization.running import Stages, amax_of_all, quantize
from tests.reference.checkpoints import write_target

# Runs in a process of its own: waits when so many bytes of the stage are done.
WAITING_RUN = """
import sys
from pathlib import Path
from dflash_trt.checkpoints.target import read_target
from tests.quantization.running import Stages, quantize

class Waiting(Stages):
    def advance(self, count):
        super().advance(count)
        if self._current == sys.argv[3] and self.done[self._current] > int(sys.argv[4]):
            print("waiting", flush=True)
            sys.stdin.readline()

quantize(read_target(sys.argv[1]), Path(sys.argv[2]), progress=Waiting())
"""
QUANTIZING = "quantizing to NVFP4"

Start = Callable[[Path, str, int], "subprocess.Popen[str]"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A target of its own, of several shards."""
    return write_target(
        tmp_path / "source", num_layers=4, hidden=32, heads=2, vocab=64, shards=4, dtype="bfloat16"
    )


@pytest.fixture
def start(source: Path) -> Iterator[Start]:
    """Starts a run in another process, and waits until it waits."""
    running: list[subprocess.Popen[str]] = []

    def call(destination: Path, stage: str, count: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WAITING_RUN, str(source), str(destination), stage]
        process = subprocess.Popen(
            [*command, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        return process

    yield call
    for process in running:
        if process.poll() is None:
            process.kill()
            process.communicate()


class Counting:
    """Activations that count how often they were observed."""

    def __init__(self, spec: TargetSpec) -> None:
        known = Activations.known(amax_of_all(spec))
        self.calls = 0

        def observe(workspace: Path) -> Any:
            self.calls += 1
            assert workspace.is_dir() and not list(workspace.iterdir())
            (workspace / "left").write_text("behind")
            return known.observe(workspace)

        self.activations = Activations(known.key, observe)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _second_shard(source: Path) -> int:
    """Source bytes that are past the first shard but before the end of the second."""
    entries = read_target(source).checkpoint.tensors.values()
    first = sorted({entry.file for entry in entries})[0]
    return sum(entry.length for entry in entries if entry.file == first) + 1


def _interrupt(source: Path, destination: Path) -> None:
    """Leaves what a kill in the second shard leaves."""
    failing = _Failing(KeyboardInterrupt(), _second_shard(source))
    with pytest.raises(KeyboardInterrupt):
        quantize(read_target(source), destination, progress=failing)


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    assert process.wait() == -signal.SIGKILL


def test_a_killed_run_is_continued(source: Path, tmp_path: Path, start: Start) -> None:
    spec = read_target(source)
    out = tmp_path / "out"
    _kill(start(out / "q", QUANTIZING, _second_shard(source)))
    assert _names(out) == [".q.quantizing"]
    first = partial_folder(out / "q") / "checkpoint" / spec.checkpoint.files[0].name
    inode = first.stat().st_ino
    stages, counting = Stages(), Counting(spec)
    written = quantize(spec, out / "q", activations=counting.activations, progress=stages)
    assert written.resumed_shards == 1 and written.shards == len(spec.checkpoint.files)
    assert (out / "q" / first.name).stat().st_ino == inode
    assert f"continuing: 1 of {written.shards} shards are finished" in stages.totals
    assert "reading weights" not in stages.totals and counting.calls == 0
    assert _names(out) == ["q"]
    whole = quantize(spec, tmp_path / "whole")
    assert _contents(out / "q") == _contents(tmp_path / "whole")
    assert written.errors == whole.errors and whole.resumed_shards == 0


def test_a_kill_before_the_first_shard(source: Path, tmp_path: Path, start: Start) -> None:
    _kill(start(tmp_path / "q", "reading weights", 1))
    spec = read_target(source)
    counting = Counting(spec)
    written = quantize(spec, tmp_path / "q", activations=counting.activations)
    assert written.resumed_shards == 0 and counting.calls == 1
    assert _names(tmp_path) == ["q", "source"]


def _starts_over(source: Path, folder: Path, **options: Any) -> Stages:
    """Nothing of an interrupted run gets into what the next one writes; its progress."""
    spec, stages = read_target(source), Stages()
    assert quantize(spec, folder / "q", progress=stages, **options).resumed_shards == 0
    quantize(spec, folder / "whole", **options)
    assert _contents(folder / "q") == _contents(folder / "whole")
    return stages


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": Algorithm.FP8},
        {"exclude": ("*.o_proj",)},
        {"quantize_lm_head": True},
        {"activations": "other"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_options_start_over(source: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    _interrupt(source, tmp_path / "q")
    if "activations" in change:
        amax = amax_of_all(read_target(source))
        change = {"activations": Activations("other", lambda workspace: amax)}
    stages = _starts_over(source, tmp_path, **change)
    assert "starting over: the checkpoint or the options have changed" in stages.totals


def test_a_source_that_was_saved_again_starts_over(source: Path, tmp_path: Path) -> None:
    _interrupt(source, tmp_path / "q")
    file = read_target(source).checkpoint.files[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)  # the same header, other weights
    _starts_over(source, tmp_path)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("checkpoint/{first}", lambda path: os.truncate(path, 1000)),
        ("checkpoint/{first}", Path.unlink),
        ("state.json", lambda path: path.write_text("{")),
        ("state.json", Path.unlink),
    ],
)
def test_damaged_leftovers_are_not_trusted(
    source: Path, tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    _interrupt(source, tmp_path / "q")
    first = read_target(source).checkpoint.files[0].name
    damage(partial_folder(tmp_path / "q") / name.format(first=first))
    _starts_over(source, tmp_path)


def test_two_runs_at_once(source: Path, tmp_path: Path, start: Start) -> None:
    process = start(tmp_path / "q", QUANTIZING, _second_shard(source))
    with pytest.raises(DflashError, match="q: is being written by another process"):
        quantize(read_target(source), tmp_path / "q")
    process.communicate("\n" * 1000)
    assert process.returncode == 0
    assert _names(tmp_path) == ["q", "source"]


class _Failing(Stages):
    def __init__(self, error: BaseException, after: int) -> None:
        super().__init__()
        self._error, self._after = error, after

    def advance(self, count: int) -> None:
        super().advance(count)
        if self._current == QUANTIZING and self.done[QUANTIZING] > self._after:
            raise self._error


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("odd"), DflashError("wrong")]
)
def test_an_error_leaves_nothing(source: Path, tmp_path: Path, error: Exception) -> None:
    wanted = DflashError if isinstance(error, OSError) else type(error)
    with pytest.raises(wanted) as caught:
        quantize(
            read_target(source),
            tmp_path / "a" / "b" / "q",
            progress=_Failing(error, _second_shard(source)),
        )
    assert ".quantizing" not in str(caught.value)
    assert _names(tmp_path) == ["source"]


def test_a_replacement_that_fails_leaves_the_old_one(source: Path, tmp_path: Path) -> None:
    spec = read_target(source)
    quantize(spec, tmp_path / "q", Algorithm.FP8)
    old = _contents(tmp_path / "q")
    with pytest.raises(RuntimeError):
        quantize(spec, tmp_path / "q", overwrite=True, progress=_Failing(RuntimeError("odd"), 0))
    assert _contents(tmp_path / "q") == old and _names(tmp_path) == ["q", "source"]


def test_a_source_that_shrinks_meanwhile(source: Path, tmp_path: Path) -> None:
    spec = read_target(source)

    class Shrinking(Stages):
        def stage(self, name: str, total: int | None, unit: Any = "bytes") -> None:
            super().stage(name, total, unit)
            if name == QUANTIZING:
                os.truncate(spec.checkpoint.files[-1], 2000)

    with pytest.raises(DflashError, match="ends inside tensor"):
        quantize(spec, tmp_path / "q", progress=Shrinking())
    assert _names(tmp_path) == ["source"]


def test_a_folder_that_cannot_be_made() -> None:
    making = partial_checkpoint(Path("/proc/quantized"), "key", overwrite=False)
    with pytest.raises(DflashError) as caught, making:
        pass
    assert "another process" not in str(caught.value)

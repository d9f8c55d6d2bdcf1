"""Interrupted runs: what a kill leaves, what the next run makes of it, and what errors leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.errors import DflashError
from dflash_trt.models.target import read_target
from dflash_trt.quantization.partial import partial_checkpoint, partial_folder
from dflash_trt.quantization.scales import Activations
from tests.quantization.running import Failing, Stages, amax_of_all, quantize
from tests.reference.checkpoints import write_target

# Runs in a process of its own, which kills itself when so many bytes are quantised.
KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from dflash_trt.models.target import read_target
from tests.quantization.running import Stages, quantize

class Killing(Stages):
    def advance(self, count):
        super().advance(count)
        if self.done.get("quantizing to NVFP4", 0) > int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

quantize(read_target(sys.argv[1]), Path(sys.argv[2]), progress=Killing())
"""
QUANTIZING = "quantizing to NVFP4"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A target of its own, of several shards."""
    return write_target(
        tmp_path / "source", num_layers=4, hidden=32, heads=2, vocab=64, shards=4, dtype="bfloat16"
    )


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
    failing = Failing(KeyboardInterrupt(), QUANTIZING, _second_shard(source))
    with pytest.raises(KeyboardInterrupt):
        quantize(read_target(source), destination, progress=failing)


def test_a_killed_run_is_continued(source: Path, tmp_path: Path) -> None:
    spec = read_target(source)
    out = tmp_path / "out"
    arguments = [str(source), str(out / "q"), str(_second_shard(source))]
    killed = subprocess.run([sys.executable, "-c", KILLED_RUN, *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert _names(out) == [".q.quantizing"]
    first = partial_folder(out / "q") / "checkpoint" / spec.checkpoint.files[0].name
    inode = first.stat().st_ino
    stages, seen = Stages(), Activations.known(amax_of_all(spec))
    unseen = Activations(seen.key, lambda workspace: pytest.fail("observed again"))
    written = quantize(spec, out / "q", activations=unseen, progress=stages)
    assert written.resumed_shards == 1 and written.shards == len(spec.checkpoint.files)
    assert (out / "q" / first.name).stat().st_ino == inode
    assert f"continuing: 1 of {written.shards} shards are finished" in stages.totals
    assert "reading weights" not in stages.totals
    assert _names(out) == ["q"]
    whole = quantize(spec, tmp_path / "whole")
    assert _contents(out / "q") == _contents(tmp_path / "whole")
    assert written.errors == whole.errors and whole.resumed_shards == 0


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
        {"exclude": ("*.o_proj",)},
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


def _save_again(shard: Path) -> None:
    """With the same header, and other weights."""
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("source/{first}", _save_again),
        (".q.quantizing/checkpoint/{first}", lambda path: os.truncate(path, 1000)),
        (".q.quantizing/checkpoint/{first}", Path.unlink),
        (".q.quantizing/state.json", lambda path: path.write_text("{")),
        (".q.quantizing/state.json", Path.unlink),
    ],
)
def test_what_has_changed_meanwhile_is_not_trusted(
    source: Path, tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    _interrupt(source, tmp_path / "q")
    first = read_target(source).checkpoint.files[0].name
    damage(tmp_path / name.format(first=first))
    _starts_over(source, tmp_path)


def test_two_runs_at_once(source: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="the first"),
        partial_checkpoint(tmp_path / "q", "key", overwrite=False),
    ):
        with pytest.raises(DflashError, match="q: is being written by another process"):
            quantize(read_target(source), tmp_path / "q")
        assert _names(tmp_path) == [".q.quantizing", "source"]
        raise RuntimeError("the first")
    assert _names(tmp_path) == ["source"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("odd"), DflashError("wrong")]
)
def test_an_error_leaves_nothing(source: Path, tmp_path: Path, error: Exception) -> None:
    wanted = DflashError if isinstance(error, OSError) else type(error)
    with pytest.raises(wanted) as caught:
        quantize(
            read_target(source),
            tmp_path / "a" / "b" / "q",
            progress=Failing(error, QUANTIZING, _second_shard(source)),
        )
    assert ".quantizing" not in str(caught.value)
    assert _names(tmp_path) == ["source"]

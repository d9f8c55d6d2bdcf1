"""A training that is killed at random moments ends with the bytes of one that was not."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.training.prompts import command, contents, write_prompts

KILLS = 10
MOST_CHANGES = 10
pytestmark = pytest.mark.exhaustive


def test_ten_kills_change_no_byte(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "shifts.jsonl", 40)
    more = "--rows 24 --steps 60 --answer-tokens 64 --max-length 192".split()
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    assert _start(command(prompts, tmp_path / "whole" / "draft", *more)).wait() == 0

    words = command(prompts, tmp_path / "killed" / "draft", *more)
    moments, killed = random.Random(0), 0
    for _ in range(KILLS):
        process = _start(words)
        if _kill(process, tmp_path / "killed", moments.randint(1, MOST_CHANGES), moments.random()):
            killed += 1
        if process.returncode == 0 or _is_done(tmp_path / "killed"):
            break
    else:
        assert _start(words).wait() == 0
    assert killed >= KILLS // 2
    drafts = [contents(tmp_path / name / "draft") for name in ("killed", "whole")]
    assert drafts[0] == drafts[1]


def _kill(process: subprocess.Popen[bytes], folder: Path, changes: int, delay: float) -> bool:
    """Kills it soon after so many changes to what is kept; False if it ended before.

    Not after a time: a machine may be ten times as fast at one run as at the next.
    """
    before = _state(folder)
    while changes and process.poll() is None:
        time.sleep(0.005)
        if (now := _state(folder)) != before:
            before, changes = now, changes - 1
    time.sleep(0.2 * delay)
    process.kill()
    return process.wait() != 0


def _state(folder: Path) -> set[tuple[str, int]]:
    """Every file below `folder` with its size; what goes away while one looks is left out."""
    found: set[tuple[str, int]] = set()
    for parent, _, files in os.walk(folder):  # unlike rglob, it passes over vanished folders
        for name in files:
            path = Path(parent, name)
            with suppress(FileNotFoundError):
                found.add((str(path), path.stat().st_size))
    return found


def _is_done(folder: Path) -> bool:
    """Whether a kill came when nothing was left to do."""
    marks = [folder / ".draft.work" / name for name in ("publishing", "published.json")]
    return (folder / "draft").exists() and not any(mark.exists() for mark in marks)


def _start(words: list[str]) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "dflash_trt.cli.main", *words]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL)

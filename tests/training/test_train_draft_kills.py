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
# Of a whole run's changes to what it keeps: the kills lie in these, as a busy machine shows fewer.
KILLED_SHARE = 0.7
POLL_S = 0.02
pytestmark = pytest.mark.exhaustive


def test_ten_kills_change_no_byte(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "shifts.jsonl", 40)
    more = "--rows 24 --steps 60 --answer-tokens 64 --max-length 192".split()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    changes = run_whole(command(prompts, whole / "draft", *more), whole)
    moments = choose_moments(random.Random(0), changes)
    assert run_killed(command(prompts, killed / "draft", *more), killed, moments) == KILLS
    drafts = [contents(folder / "draft") for folder in (killed, whole)]
    assert drafts[0] == drafts[1]


def run_whole(words: list[str], folder: Path) -> int:
    """Runs it to its end in a new folder; returns how often it changed what it keeps there."""
    folder.mkdir()
    process = _start(words)
    changes = _wait(process, folder, None)
    assert process.wait() == 0
    return changes


def choose_moments(chance: random.Random, changes: int) -> list[tuple[int, float]]:
    """For each kill: after how many changes since the last one, and how long after them, in s.

    Not after a time: a machine may be ten times as fast at one run as at the next.
    """
    places = sorted(chance.sample(range(1, int(changes * KILLED_SHARE)), KILLS))
    gaps = [place - before for before, place in zip([0, *places], places, strict=False)]
    return [(gap, 0.2 * chance.random()) for gap in gaps]


def run_killed(words: list[str], folder: Path, moments: list[tuple[int, float]]) -> int:
    """Runs it in a new folder, kills it at `moments`, lets it end; returns how often it died."""
    folder.mkdir()
    killed = 0
    for changes, delay in moments:
        process = _start(words)
        _wait(process, folder, changes)
        time.sleep(delay)
        process.kill()
        killed += process.wait() != 0
    assert _start(words).wait() == 0
    return killed


def _wait(process: subprocess.Popen[bytes], folder: Path, most: int | None) -> int:
    """Waits for so many changes in `folder`, or for the end; returns how many there were."""
    before, changes = _state(folder), 0
    while changes != most and process.poll() is None:
        time.sleep(POLL_S)
        if (now := _state(folder)) != before:
            before, changes = now, changes + 1
    return changes


def _state(folder: Path) -> set[tuple[str, int]]:
    """Every file below `folder` with its size; what goes away while one looks is left out."""
    found: set[tuple[str, int]] = set()
    for parent, _, files in os.walk(folder):  # unlike rglob, it passes over vanished folders
        for name in files:
            path = Path(parent, name)
            with suppress(FileNotFoundError):
                found.add((str(path), path.stat().st_size))
    return found


def _start(words: list[str]) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "dflash_trt.cli.main", *words]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL)

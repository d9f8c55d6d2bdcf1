"""Runs a training to its end, or kills it at random moments and begins it again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.errors import DflashError

# Of a whole run's changes to what it keeps: the kills lie in these, as a busy machine shows fewer.
KILLED_SHARE = 0.7
LONGEST_DELAY_S = 0.2
POLL_S = 0.02


def run_whole(words: Sequence[str], folder: Path) -> int:
    """Runs it to its end in a new folder; returns how often it changed what it keeps there.

    Raises:
        DflashError: it failed.
    """
    folder.mkdir()
    process = _start(words)
    changes = _wait(process, folder, None)
    _check(process)
    return changes


@dataclass(frozen=True, slots=True)
class Moment:
    """A kill: after so many changes since the last one, and so many seconds after them."""

    changes: int
    delay: float


def choose_moments(chance: random.Random, changes: int, kills: int) -> list[Moment]:
    """Not after a time: a machine may be ten times as fast at one run as at the next."""
    places = sorted(chance.sample(range(1, int(changes * KILLED_SHARE)), kills))
    gaps = [place - before for before, place in zip([0, *places], places, strict=False)]
    return [Moment(gap, LONGEST_DELAY_S * chance.random()) for gap in gaps]


def run_killed(words: Sequence[str], folder: Path, moments: Sequence[Moment]) -> int:
    """Runs it in a new folder, kills it at `moments`, lets it end; returns how often it died.

    Raises:
        DflashError: the last run failed.
    """
    folder.mkdir()
    killed = 0
    for moment in moments:
        process = _start(words)
        _wait(process, folder, moment.changes)
        time.sleep(moment.delay)
        process.kill()
        killed += process.wait() != 0
    _check(_start(words))
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


def _start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "dflash_trt", *words], stdout=subprocess.DEVNULL)


def _check(process: subprocess.Popen[bytes]) -> None:
    if (code := process.wait()) != 0:
        raise DflashError(f"ended with {code}", where="train-draft")

"""A training that is killed at random moments, against one that is not: the same draft to the byte?

Asks for the plan of `--hours` first, then trains twice with that plan's prompts and steps: once
undisturbed, once with `--kills` SIGKILLs, each followed by the same command. The target is the
demo pair's, the prompts are beginnings of its corpus.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from dflash_perf.bench.base import Figures, Work, bench
from dflash_trt.config import data_folder
from dflash_trt.errors import DflashError
from dflash_trt.training.demo.corpus import document

# Of a whole run's changes to what it keeps: the kills lie in these, as a busy machine shows fewer.
KILLED_SHARE = 0.7
LONGEST_DELAY_S = 0.2
POLL_S = 0.02
PROMPTS, HELD_OUT, CHARACTERS = 2_000, 16, 100


@bench()
def measure(work: Work, *, hours: float = 0.2, kills: int = 10, seed: int = 1) -> Figures:
    files = {"--prompts": (0, PROMPTS), "--held-out": (PROMPTS, HELD_OUT)}
    words = ["train-draft", "--target", str(data_folder("demo_pair") / "target")]
    words += ["--hours", f"{hours:g}", "--json"]
    for option, (first, count) in files.items():
        path = work.folder / f"{option.strip('-')}.jsonl"
        path.write_text("".join(map(_line, range(first, first + count))), "utf-8")
        words += [option, str(path)]
    plan = json.loads(_run([*words, "--plan", "-o", str(work.folder / "planned")]))["plan"]
    words += ["--rows", str(plan["rows"]), "--steps", str(plan["steps"])]
    whole, killed = work.folder / "whole", work.folder / "killed"
    began = time.monotonic()
    changes = run_whole([*words, "-o", str(whole / "draft")], whole)
    ended = time.monotonic()
    moments = choose_moments(random.Random(seed), changes, kills)
    died = run_killed([*words, "-o", str(killed / "draft")], killed, moments)
    hours_taken = (ended - began) / 3600, (time.monotonic() - ended) / 3600
    hashes = [_hash_files(folder / "draft") for folder in (whole, killed)]
    print(f"undisturbed {hours_taken[0]:.3f} h; killed {died} times, in all {hours_taken[1]:.3f} h")
    print("every byte is equal" if hashes[0] == hashes[1] else "NOT EQUAL")
    return {
        "plan": plan,
        "changes": changes,
        "equal": hashes[0] == hashes[1],
        "undisturbed": {"hours": hours_taken[0], "killed": 0, "sha256": hashes[0]},
        "killed": {"hours": hours_taken[1], "killed": died, "sha256": hashes[1]},
    }


def _line(number: int) -> str:
    return json.dumps({"prompt": document(0, "training-kills", number)[:CHARACTERS]}) + "\n"


def _hash_files(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below `folder`, by its path in it."""
    return {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


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


def _command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "dflash_trt", *words]


def _start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(_command(words), stdout=subprocess.DEVNULL)


def _run(words: Sequence[str]) -> str:
    done = subprocess.run(_command(words), stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise DflashError(f"ended with {done.returncode}", where="train-draft")
    return done.stdout


def _check(process: subprocess.Popen[bytes]) -> None:
    if (code := process.wait()) != 0:
        raise DflashError(f"ended with {code}", where="train-draft")

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
    runs: Figures = {}
    changes = 0
    for name in ("undisturbed", "killed"):
        folder = work.folder / name
        command = [*words, "-o", str(folder / "draft")]
        began = time.monotonic()
        if name == "undisturbed":
            changes = run_whole(command, folder)
            died = 0
        else:
            died = run_killed(command, folder, choose_moments(random.Random(seed), changes, kills))
        took = time.monotonic() - began
        hashes = {path: sha256(data).hexdigest() for path, data in contents(folder / "draft")}
        runs[name] = {"hours": took / 3600, "killed": died, "sha256": hashes}
        print(f"{name}: {took / 3600:.3f} h, killed {died} times, {len(hashes)} files")
    is_equal = runs["undisturbed"]["sha256"] == runs["killed"]["sha256"]
    print("every byte is equal" if is_equal else "NOT EQUAL")
    return {"plan": plan, "changes": changes, "equal": is_equal, **runs}


def _line(number: int) -> str:
    return json.dumps({"prompt": document(0, "training-kills", number)[:CHARACTERS]}) + "\n"


def contents(folder: Path) -> list[tuple[str, bytes]]:
    """Every file below `folder`: its path in it, and its bytes."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [(path.relative_to(folder).as_posix(), path.read_bytes()) for path in files]


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

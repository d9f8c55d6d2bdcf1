"""Runs a part of the check: in a process of its own, or in this one.

A fault of a kernel leaves a CUDA context useless and may end its process, so the process that keeps
the record has no context. A part's findings go through a file, line by line: what was found before
a process died is whole, and none of it waits in a pipe.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.errors import DflashError, one_line
from dflash_trt.proof.gpu_check.gpu_record import (
    OutOfTimeError,
    PartOutcome,
    PartSkippedError,
    Probe,
)

LEAST_SECONDS = 10.0
"""What a case or a measurement takes at most, its compilation included; none is begun with less."""
# A part heeds its time itself where it can; what does not is killed so much later.
GRACE_SECONDS = 10.0
KILL_SECONDS = 5.0
LOG_LINES = 30


@dataclass(frozen=True, slots=True)
class Setting:
    """A part's own `folder`, which is removed afterwards, and its end by `time.monotonic`."""

    folder: Path
    ends: float

    def leave_time(self, what: str) -> None:
        """Raises OutOfTimeError where too little is left, which leaves out `what`."""
        if time.monotonic() + LEAST_SECONDS > self.ends:
            raise OutOfTimeError(f"{what} are left to --only")


PartWork = Callable[[Setting], Iterator[Probe]]
"""Yields findings as they are made; another process imports it by name."""

Found = tuple[bool | None, str] | tuple[bool | None, str, dict[str, Any]]
"""A finding without its name: whether it passed, its detail and its figures."""


def attempt(
    name: str, find: Callable[..., Found | Iterator[Probe]], *given: Any
) -> Iterator[Probe]:
    """Yields what `find` finds; an error of it is a finding called `name`, and ends nothing else.

    `find` tells the one finding of that name, or makes probes with names of their own.
    """
    try:
        found = find(*given)
        yield from [Probe(name, *found)] if isinstance(found, tuple) else found
    except (PartSkippedError, OutOfTimeError):
        raise
    except Exception as error:  # what a library does here for the first time is a finding
        yield Probe(name, False, describe(error))


def describe(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, DflashError):
        return error.message
    return f"{type(error).__name__}: {one_line(error)}"


def run_here(
    work: PartWork, setting: Setting, note: Callable[[Probe], None] = lambda probe: None
) -> PartOutcome:
    """Runs a part in this process; what stops it is how it ended."""
    outcome, started = PartOutcome("done"), time.monotonic()
    try:
        for probe in work(setting):
            outcome.probes.append(probe)
            note(probe)
    except PartSkippedError as error:
        outcome.status, outcome.reason = "skipped", error.message
    except OutOfTimeError as error:
        outcome.status, outcome.reason = "out of time", error.message
    except Exception as error:
        outcome.status, outcome.reason = "failed", describe(error)
    outcome.seconds = time.monotonic() - started
    return outcome


class PartProcess:
    """A part in a process of its own, which has so many seconds; `end` is to be called."""

    def __init__(self, work: PartWork, seconds: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dflash-trt-")
        folder, self._started = Path(self._folder.name), time.monotonic()
        self._found, self._log = folder / "found.jsonl", folder / "log.txt"
        self._found.touch()
        self._log.touch()
        self._ends = self._started + seconds + GRACE_SECONDS
        given = work, Setting(folder, self._started + seconds), self._found, self._log
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=_work_in_child, args=given)
        self._process.start()

    def is_over(self, wait: float) -> bool:
        """Whether it has ended or is late, after `wait` seconds if not before."""
        self._process.join(max(0.0, min(wait, self._ends - time.monotonic())))
        return not self._process.is_alive() or time.monotonic() >= self._ends

    def end(self) -> PartOutcome:
        """Ends the process if it runs still, with what it has started; what it found."""
        process = self._process
        if is_late := process.is_alive():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()  # before it had a session of its own
        process.join(KILL_SECONDS)  # a driver that hangs holds a process that was killed
        outcome = PartOutcome("died", seconds=time.monotonic() - self._started)
        for line in self._found.read_text(encoding="utf-8").splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # its last words were cut
            record = json.loads(line)
            if "ended" in record:
                outcome.status, outcome.reason = record["ended"]
            else:
                outcome.probes.append(Probe(**record))
        if outcome.status == "died":
            self._explain(outcome, is_late=is_late)
        self._folder.cleanup()
        return outcome

    def _explain(self, outcome: PartOutcome, *, is_late: bool) -> None:
        outcome.log = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        last = f"after {outcome.probes[-1].name!r}" if outcome.probes else "before any finding"
        said = [line for line in outcome.log if line.strip()] or ["it said nothing"]
        words = next((line for line in said if line.startswith("Fatal Python error")), said[-1])
        code = self._process.exitcode or 0
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        outcome.reason = f"its process died ({how}) {last}: {one_line(words)}"
        if is_late:
            outcome.reason = f"it gave no answer and was ended {last}"


def run_in_child(work: PartWork, seconds: float) -> PartOutcome:
    """Runs one part alone in a process of its own, which this process's Ctrl-C ends as well."""
    process = PartProcess(work, seconds)
    try:
        while not process.is_over(1.0):
            pass
    finally:
        outcome = process.end()
    return outcome


def _work_in_child(work: PartWork, setting: Setting, found: Path, log: Path) -> None:
    """What the child does: its own session, its output to the log, its findings to the file."""
    with suppress(OSError):
        os.setsid()  # Ctrl-C is for the parent, which ends the child and what it has started
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.enable()
    with found.open("a", encoding="utf-8", buffering=1) as file:

        def note(probe: Probe) -> None:
            file.write(json.dumps(probe.to_json(), allow_nan=False) + "\n")

        outcome = run_here(work, setting, note)
        file.write(json.dumps({"ended": (outcome.status, outcome.reason)}) + "\n")

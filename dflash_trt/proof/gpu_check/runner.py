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
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from dflash_trt.errors import one_line
from dflash_trt.proof.gpu_check.gpu_record import (
    OutOfTimeError,
    PartOutcome,
    PartSkippedError,
    Probe,
    describe_error,
)

# A part heeds its time itself where it can; what does not is killed so much later.
GRACE_SECONDS = 10.0
POLL_SECONDS, KILL_SECONDS = 0.05, 5.0
LOG_LINES = 30


@dataclass(frozen=True, slots=True)
class Setting:
    """A part's own `folder`, which is removed afterwards, and its end by `time.monotonic`.

    With `is_long` everything is run, whatever it takes.
    """

    folder: Path
    ends: float
    is_long: bool = False

    def has(self, seconds: float) -> bool:
        """Whether so much time is left."""
        return time.monotonic() + seconds <= self.ends


PartWork = Callable[[Setting], Iterator[Probe]]
"""Yields findings as they are made; another process imports it by name."""


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
        outcome.status, outcome.reason = "failed", describe_error(error)
    outcome.seconds = time.monotonic() - started
    return outcome


def run_in_child(work: PartWork, setting: Setting) -> PartOutcome:
    """Runs a part in a process of its own, until its time is up or Ctrl-C or SIGTERM stops it."""
    found, log = setting.folder / "found.jsonl", setting.folder / "log.txt"
    found.touch()
    log.touch()
    spawn = multiprocessing.get_context("spawn")
    child = spawn.Process(target=_work_in_child, args=(work, setting, found, log))
    started, stop = time.monotonic(), None
    child.start()
    try:
        while child.is_alive() and time.monotonic() < setting.ends + GRACE_SECONDS:
            child.join(POLL_SECONDS)
    except (KeyboardInterrupt, SystemExit) as signalled:
        stop = signalled
    is_late = child.is_alive()
    _end(child)
    outcome = _read(found)
    outcome.seconds = time.monotonic() - started
    if stop is not None:
        outcome.status, outcome.reason = "interrupted", f"it had run {outcome.seconds:.0f} s"
        outcome.stop = stop
    elif outcome.status == "died":
        outcome.log = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        outcome.reason = _describe_death(child.exitcode, outcome)
        if is_late:
            outcome.status, outcome.reason = "no answer", f"it was ended{_after(outcome)}"
    return outcome


def _work_in_child(work: PartWork, setting: Setting, found: Path, log: Path) -> None:
    """What the child does: its own session, its output to the log, its findings to the file."""
    with suppress(OSError):
        os.setsid()  # Ctrl-C is for the parent, which ends the child and what it has started
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.enable()
    with found.open("a", encoding="utf-8") as file:

        def note(probe: Probe) -> None:
            file.write(json.dumps(probe.to_json(), allow_nan=False) + "\n")
            file.flush()

        outcome = run_here(work, setting, note)
        ended = {"status": outcome.status, "reason": outcome.reason}
        file.write(json.dumps({"ended": ended}) + "\n")


def _end(child: BaseProcess) -> None:
    """Ends the child, and what it may have started."""
    if child.is_alive() and child.pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()  # before it had a session of its own
    child.join(KILL_SECONDS)  # a driver that hangs holds a process that was killed


def _read(found: Path) -> PartOutcome:
    """What the child has written; "died" if it did not come to write how it ended."""
    outcome = PartOutcome("died")
    for line in found.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # its last words were cut
        record = json.loads(line)
        if "ended" in record:
            outcome.status, outcome.reason = record["ended"]["status"], record["ended"]["reason"]
        else:
            outcome.probes.append(Probe(**record))
    return outcome


def _describe_death(code: int | None, outcome: PartOutcome) -> str:
    """How a process ended that did not say so itself, and what it said of it."""
    how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
    said = [line for line in outcome.log if line.strip()] or ["it said nothing"]
    words = next((line for line in said if line.startswith("Fatal Python error")), said[-1])
    return f"its process died ({how}){_after(outcome)}: {one_line(words)}"


def _after(outcome: PartOutcome) -> str:
    return f" after {outcome.probes[-1].name!r}" if outcome.probes else " before any finding"

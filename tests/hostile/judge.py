"""What a hostile input is, and how commands may end on it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dflash_trt.errors import MAX_LINE

MOST_SECONDS = 20
MOST_BYTES = 2 << 30
_QUIET = re.compile(r"✓ |note: |\d+ CPU threads? for a step|[\u2801-\u28ff] |\s*$")
_NOISE = re.compile(r"Traceback|panicked|onnxruntime|Warning|^\s*File \"")

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostileCase:
    """Inputs and the commands that meet them, each only if the one before it was done.

    Args:
        about: what is hostile, for whoever reads of a fault.
        needs: what is copied beside it: "pair", "bundle".
        damage: makes the input, in the folder where the commands run.
        is_intact: a text that comes out must be that of the bundle as it was.
    """

    about: str
    needs: tuple[str, ...]
    damage: Callable[[Path], object]
    commands: tuple[Command, ...]
    is_intact: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """What the commands of a case did.

    Attributes:
        code: that of the last command; None where its process was killed, or died.
        out, err: both outputs of all commands.
        seconds: of processor time, with child processes.
        max_bytes: the most memory that any one process had.
        left: what the last command left behind although it failed.
    """

    code: int | None
    out: str
    err: str
    seconds: float
    max_bytes: int
    left: list[str] = field(default_factory=list)


def find_fault(case: HostileCase, ending: Ending, good: str) -> str | None:
    """What is wrong with how the commands ended; None: nothing. `good` is the bundle's text."""
    lines = ending.err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    # `verify` says on stdout what is not identical.
    is_verdict = case.commands[-1][0] == "verify" and "differ" in ending.out
    faults = {
        f"exit code {ending.code}": ending.code not in (0, 1, 2),
        f"exit code {ending.code} with {len(errors)} error lines": (
            len(errors) != (ending.code != 0) and not (ending.code == 1 and is_verdict)
        ),
        f"took {ending.seconds:.1f} s of processor time": ending.seconds > MOST_SECONDS,
        f"took {ending.max_bytes >> 20:,} MiB": ending.max_bytes > MOST_BYTES,
        f"left {ending.left[:3]}": bool(ending.left),
        f"gives another text: {ending.out[:40]!r}": (
            case.is_intact and ending.code == 0 and ending.out != good
        ),
    }
    for line in lines:
        is_noise = line not in errors and bool(_NOISE.search(line))
        is_unsaid = bool(ending.code) and line not in errors and not _QUIET.match(line)
        is_odd = not line.isprintable() or len(line) > len("error: ") + MAX_LINE
        faults[f"stderr has {line[:80]!a}, {len(line)} characters"] = (
            is_noise or is_unsaid or (bool(ending.code) and is_odd)
        )
    return next((fault for fault, is_so in faults.items() if is_so), None)

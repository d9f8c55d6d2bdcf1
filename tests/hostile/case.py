"""What a hostile input is, and how a command may end on it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from dflash_trt.errors import MAX_LINE

SECRET = "the key of somebody else"
"""Stands in every file that a link leads to; it must not come back."""
OUTSIDE = "outside"
"""Folder beside that of the input, for what links lead to."""

MOST_SECONDS = 20
MOST_BYTES = 2 << 30
_QUIET = re.compile(
    r"✓ |note: |\d+ CPU threads? for a step|[\u2801-\u28ff] |\s*$"
)  # stages of a build, as a pipe gets them
_NOISE = re.compile(r"Traceback|panicked|onnxruntime|Warning|^\s*File \"")

Command = tuple[str, ...]
THREAD = ("--threads", "1")
BUILD: Command = ("build", "--target", "pair/pair.yaml", "-o", "out/b")
PROMPT = ("--prompt", "cab", "--max-tokens", "4", *THREAD)
BUILT: tuple[Command, ...] = (BUILD, ("generate", "out/b", *PROMPT))
"""A pair is built, and if that is done, asked."""
_FIGURES = ("--input-tokens", "16", "--output-tokens", "16", "--acceptance", "3")
_CALIBRATED = ("--precision", "fp8", "--calibration", "pair/prompts.jsonl")
_OTHERS: tuple[tuple[Command, ...], ...] = (
    (("plan", "--target", "pair/pair.yaml", "--gpu", "b200", *_FIGURES),),
    (("quantize", "--checkpoint", "pair/target", "-o", "out/q", *_CALIBRATED),),
    (("build", "--target", "pair/pair.yaml", "-o", "out/b", *_CALIBRATED),),
    (
        (
            *("build", "--target", "pair/pair.yaml", "-o", "out/d"),
            *("--executor", "trtllm", "--profile", "h100x1"),
        ),
    ),
)


def draw_readers(random: Random) -> tuple[Command, ...]:
    """Commands that read a pair: mostly those that build it."""
    return random.choice(_OTHERS) if random.random() < 0.3 else BUILT


@dataclass(frozen=True, slots=True)
class HostileCase:
    """Inputs and the commands that meet them, each only if the one before it was done.

    Args:
        about: what is hostile, for whoever reads of a fault.
        needs: what is copied beside it: "pair", "bundle", "hf".
        damage: makes the input, in the folder where the commands run.
        before: runs in the process of the commands, before them.
        is_intact: a text that comes out must be that of the bundle as it was; what commands before
            the last one say may stand before it.
    """

    about: str
    needs: tuple[str, ...]
    damage: Callable[[Path], object]
    commands: tuple[Command, ...]
    before: Callable[[], object] | None = None
    is_intact: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """What the commands of a case did.

    Attributes:
        code: that of the last command; None where its process was killed, or died.
        signal: what ended the process, 0 if nothing did.
        out, err: both outputs of all commands.
        left: what the last command left behind although it failed.
        copied: the new files that hold the secret.
        seconds: of processor time, with child processes.
        max_bytes: the most memory that any one process had.
    """

    code: int | None
    signal: int
    out: str
    err: str
    seconds: float
    max_bytes: int
    left: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)


def find_fault(case: HostileCase, ending: Ending, good: str) -> str | None:
    """What is wrong with how the commands ended; None: nothing. `good` is the bundle's text."""
    errors = [line for line in ending.err.splitlines() if line.startswith("error: ")]
    if ending.code is None:
        return f"its process ended by signal {ending.signal}"
    if ending.code not in (0, 1, 2):
        return f"exit code {ending.code}"
    for line in ending.err.splitlines():
        if _NOISE.search(line) and line not in errors:
            return f"stderr has {line[:80]!r}"
    if len(errors) != (ending.code != 0) and not _is_verdict(case, ending):
        return f"exit code {ending.code} with {len(errors)} error lines"
    if ending.code and (unsaid := _find_unsaid(ending.err)):
        return unsaid
    if ending.seconds > MOST_SECONDS:
        return f"took {ending.seconds:.1f} s of processor time"
    if ending.max_bytes > MOST_BYTES:
        return f"took {ending.max_bytes >> 20:,} MiB"
    if ending.left:
        return f"left {', '.join(ending.left[:3])}"
    if ending.copied:
        return f"copied the secret to {', '.join(ending.copied[:3])}"
    if SECRET in ending.out + ending.err:
        return "says the secret"
    told = ending.out[-len(good) :] if len(case.commands) > 1 else ending.out
    if case.is_intact and ending.code == 0 and told != good:
        return f"gives another text: {ending.out[:40]!r}"
    return None


def _is_verdict(case: HostileCase, ending: Ending) -> bool:
    """`verify` says on stdout what is not identical."""
    return case.commands[-1][0] == "verify" and ending.code == 1 and "differ" in ending.out


def _find_unsaid(err: str) -> str | None:
    """What is wrong with the lines of a refusal."""
    for line in err.splitlines():
        if not line.startswith("error: ") and not _QUIET.match(line):
            return f"stderr has {line[:80]!r}"
        if not line.isprintable() or len(line) > len("error: ") + MAX_LINE:
            return f"a line of {len(line)} characters: {line[:80]!a}"
    return None

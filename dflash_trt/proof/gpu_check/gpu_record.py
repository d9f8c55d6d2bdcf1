"""What the check has found: a folder with one JSON and one page, whole after every part."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dflash_trt.core.files import FileKind, exists, read_text
from dflash_trt.errors import DflashError, one_line

RECORD_NAME, PAGE_NAME = "record.json", "record.md"
PACKAGES = ("dflash_trt", "dflash_plugins")

Status = Literal[
    "done", "skipped", "failed", "died", "no answer", "out of time", "interrupted", "not run"
]
"""Ran to its end; needs what is not here; ended by an error; its process died; had to be ended when
its time was up; ended itself then; ended by Ctrl-C or the budget; never begun."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One finding: `name` says what holds if it passed; `passed` is None for a mere figure."""

    name: str
    passed: bool | None
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As strict JSON has it: numbers of NumPy are Python's, NaN and infinities are words."""
        raw: dict[str, Any] = _plain(asdict(self))
        return raw


class PartSkippedError(DflashError):
    """What a part needs is not here: no failure, but the record says so."""


class OutOfTimeError(DflashError):
    """A part's time is up; what it found so far stays."""


@dataclass(slots=True)
class PartOutcome:
    """A part's findings so far; `reason` says why it ended otherwise than done.

    `log` has the last lines of a process that died or gave no answer; `stop` is the Ctrl-C or
    SIGTERM that came while the part ran, and is not recorded.
    """

    status: Status
    reason: str | None = None
    seconds: float = 0.0
    probes: list[Probe] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    stop: BaseException | None = None

    @property
    def was_stopped(self) -> bool:
        """Whether the same command runs it again."""
        return self.status in ("interrupted", "not run")

    @property
    def is_broken(self) -> bool:
        """Whether its end alone says that something is wrong."""
        return self.status in ("failed", "died", "no answer")

    @property
    def passed(self) -> bool | None:
        """None where nothing has a verdict; what is skipped or was not run has none."""
        verdicts = [one.passed for one in self.probes if one.passed is not None]
        if self.is_broken or not all(verdicts):
            return False
        return True if verdicts else None

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "reason": self.reason,
            "seconds": round(self.seconds, 3),
            "passed": self.passed,
            "probes": [one.to_json() for one in self.probes],
            "log": self.log,
        }


@dataclass(slots=True)
class CheckRecord:
    """What is known of one `machine` (GPU, driver, versions) with one version of the code.

    `source` is a hash of that code; `parts` are in the order in which they ended.
    """

    machine: dict[str, Any]
    source: str
    date: str
    parts: dict[str, PartOutcome] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing that ran is wrong."""
        return all(one.passed is not False for one in self.parts.values())

    def unfinished(self) -> list[str]:
        """The parts that the same command or more time would tell more of."""
        ends = ("interrupted", "not run", "out of time", "no answer")
        return [name for name, one in self.parts.items() if one.status in ends]

    def to_json(self) -> dict[str, Any]:
        """Every figure."""
        return {
            "name": "gpu-check",
            "date": self.date,
            "command": "dflash-trt doctor --gpu-check",
            "source": self.source,
            "machine": self.machine,
            "passed": self.passed,
            "unfinished": self.unfinished(),
            "parts": {name: one.to_json() for name, one in self.parts.items()},
        }


def open_record(folder: Path, machine: dict[str, Any]) -> CheckRecord:
    """The record in `folder` if it is of this machine and these versions, or a new one.

    Raises:
        DflashError: it is of others, or no record (usage).
    """
    path = folder / RECORD_NAME
    if not exists(path):
        return CheckRecord(machine, source_hash(), datetime.now(UTC).isoformat(timespec="seconds"))
    text = read_text(path, FileKind.MANIFEST, named=True)
    try:
        raw = json.loads(text)
        record = CheckRecord(raw["machine"], raw["source"], raw["date"])
        for name, one in raw["parts"].items():
            probes = [Probe(**probe) for probe in one["probes"]]
            ended = one["status"], one["reason"], one["seconds"]
            record.parts[name] = PartOutcome(*ended, probes, one["log"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"is not a record of this check ({one_line(error, 80)})"
        raise DflashError(what, where=path, fix="choose another -o", usage=True) from error
    if (record.machine, record.source) != (machine, source_hash()):
        what = "is the record of another machine, other versions or other code"
        fix = "choose another -o; nothing is mixed"
        raise DflashError(what, where=path, fix=fix, usage=True)
    return record


@cache
def source_hash() -> str:
    """A hash of this project's code, in short."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None and spec.origin is not None
        root = Path(spec.origin).parent
        for path in sorted([*root.rglob("*.py"), *root.rglob("*.yaml")]):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

"""What the check has found: a folder with one JSON and one page, whole after every part."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter
from pydantic_core import to_json

from dflash_trt.core.files import FileKind, exists, read_text
from dflash_trt.core.publish import replace_file
from dflash_trt.errors import DflashError, one_line

RECORD_NAME, PAGE_NAME = "record.json", "record.md"
PACKAGES = ("dflash_trt", "dflash_plugins")
MARKS = {True: "yes", False: "no", None: ""}
LEFT_OUT = ("skipped", "not run")

Status = Literal["done", "skipped", "failed", "died", "out of time", "not run"]
"""Ran to its end; needs what is not here; ended by an error; its process died or did not end in
time; ended itself then; never begun."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One finding: `name` says what holds if it passed; `passed` is None for a mere figure."""

    name: str
    passed: bool | None
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As strict JSON has it: numbers of NumPy are Python's, NaN and infinities are words."""
        text = to_json(self, inf_nan_mode="strings", fallback=np.generic.item)
        raw: dict[str, Any] = json.loads(text)
        return raw


class PartSkippedError(DflashError):
    """What a part needs is not here: no failure, but the record says so."""


class OutOfTimeError(DflashError):
    """A part's time is up; what it found so far stays."""


@dataclass(slots=True)
class PartOutcome:
    """A part's findings so far; `reason` says why it ended otherwise than done.

    `log` has the last lines of a process that died.
    """

    status: Status
    reason: str | None = None
    seconds: float = 0.0
    probes: list[Probe] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool | None:
        """None where nothing has a verdict; what is skipped or was not run has none."""
        verdicts = [one.passed for one in self.probes if one.passed is not None]
        if self.status in ("failed", "died") or not all(verdicts):
            return False
        return True if verdicts else None

    def __str__(self) -> str:
        """How it ended."""
        failed = sum(one.passed is False for one in self.probes)
        found = f"{len(self.probes)} findings" if self.probes else "no finding"
        found += f", {failed} of them wrong" * bool(failed) + f", {self.seconds:.0f} s"
        return found if self.status == "done" else f"{self.status}: {self.reason} ({found})"

    def to_json(self) -> dict[str, Any]:
        probes = [one.to_json() for one in self.probes]
        return {**asdict(self), "passed": self.passed, "probes": probes}


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
        parts = self.parts.items()
        return [name for name, one in parts if one.status in ("out of time", "not run")]

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

    def save(self, folder: Path) -> None:
        """Writes the record and its page."""
        text = json.dumps(self.to_json(), indent=2, allow_nan=False)
        replace_file(folder / RECORD_NAME, f"{text}\n".encode())
        replace_file(folder / PAGE_NAME, self._page().encode())

    def lines(self) -> Iterator[str]:
        """A line per part that ran, per finding that failed, and per reason to leave parts out."""
        gpu, left = self.machine["gpu"], self.unfinished()
        verdict = "all that ran is as it should be" if self.passed else "something is wrong"
        unfinished = f"; {len(left)} parts are unfinished" if left else ""
        machine = f"{gpu['name']} ({gpu['arch']}), {gpu['memory_gb']} GB, CUDA {gpu['driver_cuda']}"
        yield f"{machine}: {verdict}{unfinished}"
        reasons: dict[str, Counter[str]] = {}
        for name, outcome in self.parts.items():
            if outcome.status in LEFT_OUT:
                kinds = reasons.setdefault(f"{outcome.status}: {outcome.reason}", Counter())
                kinds[name.partition(": ")[0]] += 1
                continue
            yield f"{MARKS[outcome.passed]:3}  {name}: {outcome}"
            for probe in outcome.probes:
                if probe.passed is False:
                    yield f"       no  {probe.name}: {probe.detail}"
        for reason, kinds in reasons.items():
            yield f"     {', '.join(f'{kind} ({n})' for kind, n in kinds.items())}: {reason}"

    def _page(self) -> str:
        """One page of Markdown: what the terminal shows, and every figure in words."""
        machine = self.machine
        versions = ", ".join(f"{name} {one}" for name, one in machine["libraries"].items())
        driver = machine["gpu"]["driver"] or "unknown"
        figures = [
            f"- {one.name}: {one.detail}"
            for outcome in self.parts.values()
            for one in outcome.probes
            if one.passed is None
        ]
        text = [
            f"# GPU check: {machine['gpu']['name']}, {self.date[:10]}",
            "",
            f"Driver {driver}, {machine['system']}, Python {machine['python']}, {versions}; code "
            f"{self.source}. Everything that was found is in `{RECORD_NAME}` beside this page; "
            "docs/first-gpu.md says what it means.",
            "",
            "```",
            *self.lines(),
            "```",
            *(["", "## Figures", "", *figures] if figures else []),
        ]
        return "\n".join(text) + "\n"


_RECORDS = TypeAdapter(CheckRecord)


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
        record = _RECORDS.validate_json(text)
    except ValueError as error:
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

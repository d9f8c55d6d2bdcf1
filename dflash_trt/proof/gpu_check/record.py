"""The record of a check: a folder with one JSON and one page, whole after every part."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_trt.core.files import FileKind, exists, read_text
from dflash_trt.core.publish import replace_file
from dflash_trt.errors import DflashError, one_line
from dflash_trt.proof.gpu_check.contracts import judge_contracts
from dflash_trt.proof.gpu_check.outcome import PartOutcome

RECORD_NAME, PAGE_NAME = "record.json", "record.md"
PACKAGES = ("dflash_trt", "dflash_plugins")


@dataclass(slots=True)
class CheckRecord:
    """What is known of one machine with one version of everything.

    Args:
        machine: the GPU, its driver, and the versions of what is installed.
        source: a hash of this project's code.
        parts: by name, in the order in which they ended.
    """

    machine: dict[str, Any]
    source: str
    date: str
    parts: dict[str, PartOutcome] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing that ran is wrong."""
        return all(one.passed is not False for one in self.parts.values())

    @property
    def unfinished(self) -> list[str]:
        """The parts that more time would tell more of."""
        return [name for name, one in self.parts.items() if not one.is_final(is_long=True)]

    @property
    def goes_on(self) -> bool:
        """Whether the short form would run something of it again."""
        return any(not one.is_final(is_long=False) for one in self.parts.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "name": "gpu-check",
            "date": self.date,
            "command": "dflash-trt doctor --gpu-check",
            "source": self.source,
            "machine": self.machine,
            "passed": self.passed,
            "unfinished": self.unfinished,
            "contracts": judge_contracts(self.parts),
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
        parts = {name: PartOutcome.from_json(one) for name, one in raw["parts"].items()}
        record = CheckRecord(raw["machine"], raw["source"], raw["date"], parts)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DflashError(
            f"is not a record of this check ({one_line(error, 80)})",
            where=path,
            fix="choose another -o",
            usage=True,
        ) from error
    if (record.machine, record.source) != (machine, source_hash()):
        raise DflashError(
            "is the record of another machine, other versions or other code",
            where=path,
            fix="choose another -o; nothing is mixed",
            usage=True,
        )
    return record


def write_file(path: Path, text: str) -> None:
    """Replaces a file in one step."""
    replace_file(path, text.encode())


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

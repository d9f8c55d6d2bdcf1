"""A file of JSON lines that grows, and survives being cut anywhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from dflash_trt.core.publish import replacing


class JsonLines:
    """The records in `path` and a way to add to them; closed by `with`.

    What follows the last whole line is dropped: a kill tore it.

    Attributes:
        records: those that were there, and those added.
    """

    def __init__(self, path: Path) -> None:
        self.records: list[dict[str, Any]] = []
        whole = 0
        if path.is_file():
            for line in path.read_bytes().splitlines(keepends=True):
                record = _parse(line)
                if record is None:
                    break
                self.records.append(record)
                whole += len(line)
        self._file = path.open("ab")
        self._file.truncate(whole)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes a line; it is the system's at once, and the disk's after `sync`."""
        self.records.append(dict(record))
        self._file.write(_encode(record))
        self._file.flush()

    def sync(self) -> None:
        """Waits until the disk has all of it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """May be called twice."""
        self._file.close()


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes a file of lines, whole or not at all."""
    with replacing(path, durable=True) as file:
        for record in records:
            file.write(_encode(record))


def _encode(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    """None for a line that was not finished."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None

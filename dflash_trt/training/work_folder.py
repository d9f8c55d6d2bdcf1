"""Where a training keeps what its stages have finished, so that a kill costs minutes.

A stage has a folder named by the hash of what goes into it. Its manifest is written last: a folder
without one is unfinished, and its stage goes on there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from dflash_trt.core import publish
from dflash_trt.core.files import resolved
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.errors import DflashError

_MANIFEST = "stage.json"
_STAGE = re.compile(r"([a-z]+)-[0-9a-f]{12}")
_GONE = ".gone"
_KEPT = ("prompts", "answers")
"""Stages that stay when others follow, or the training ends: they take long and are small."""


def digest(parts: Mapping[str, Any]) -> str:
    """A hash of JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Replaces a file by `value`; a kill leaves the old one or the new one."""
    publish.replace_file(path, (json.dumps(value, indent=2) + "\n").encode(), durable=True)


class JsonLines:
    """The records in `path` and a way to add to them; closed by `with`.

    What follows the last whole line is dropped: a kill tore it.
    """

    def __init__(self, path: Path) -> None:
        self.records: list[dict[str, Any]] = []
        whole = 0
        with suppress(ValueError):
            for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
                self.records.append(json.loads(line if line.endswith(b"\n") else b""))
                whole += len(line)
        self._file = path.open("ab")
        self._file.truncate(whole)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes a line; it is the system's at once, and the disk's after `sync`."""
        self.records.append(dict(record))
        self._file.write(_encode(record))
        self._file.flush()

    def sync(self) -> None:
        """Waits until the disk has all of it."""
        os.fsync(self._file.fileno())


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes a file of lines, whole or not at all."""
    publish.replace_file(path, b"".join(map(_encode, records)), durable=True)


def _encode(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


class StageFolder:
    """A stage's folder, where it works and where its result stays; `key` decides the result."""

    def __init__(self, root: Path, name: str, key: str) -> None:
        self.key = key
        self.folder = root / f"{name}-{key[:12]}"
        self.folder.mkdir(exist_ok=True)

    @property
    def record(self) -> dict[str, Any] | None:
        """What `finish` noted; None for a stage that is not finished."""
        path = self.folder / _MANIFEST
        record = read_json_object(path) if path.is_file() else {}
        return record if record.get("key") == self.key else None

    def finish(self, record: Mapping[str, Any]) -> None:
        """Marks the stage as finished."""
        write_json(self.folder / _MANIFEST, {"key": self.key, **record})


class WorkFolder:
    """The folder of one output's training; see `open_work`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def stage(self, name: str, parts: Mapping[str, Any]) -> StageFolder:
        """The stage `name` of `parts`; what it left for other parts goes, if it is not kept."""
        stage = StageFolder(self.root, name, digest(parts))
        for other, kind in self._stages():
            if name not in _KEPT and kind == name and other != stage.folder:
                self._remove(other)
        return stage

    def keep_said(self) -> None:
        """Removes every stage but prompts and answers; what somebody else put here stays."""
        for folder, kind in self._stages():
            if kind not in _KEPT:
                self._remove(folder)

    def _stages(self) -> list[tuple[Path, str]]:
        found = [(one, _STAGE.fullmatch(one.name)) for one in self.root.iterdir() if one.is_dir()]
        return [(folder, match[1]) for folder, match in found if match is not None]

    def _remove(self, folder: Path) -> None:
        """Removes a stage: a kill meanwhile leaves no half of it under its name."""
        gone = self.root / _GONE
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    @property
    def is_worthless(self) -> bool:
        """Whether it holds nothing that took long: no answer and no features."""
        said = (path.stat().st_size for one in _KEPT for path in self.root.glob(f"{one}-*/*.jsonl"))
        return not any(said) and next(self.root.glob(f"features-*/{_MANIFEST}"), None) is None


def work_folder(output: Path) -> Path:
    """Where the training of `output` works if nothing is said."""
    return output.parent / f".{output.name}.work"


@contextmanager
def open_work(root: Path) -> Iterator[WorkFolder]:
    """Makes or opens a work folder, for one process at a time.

    What ends before the first answer leaves nothing; later, the work stays.

    Raises:
        DflashError: it cannot be written, is something else, or is in use.
    """
    root = resolved(root)
    created = publish.missing_folders(root)
    is_other = root.is_dir() and any(root.iterdir()) and not (root / "lock").exists()
    if is_other or (root.exists() and not root.is_dir()):
        fix = "pass an empty or a new folder"
        raise DflashError("is no work folder of a training", where=root, fix=fix, usage=True)
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = publish.lock_folder(root, wait=False)
    except BlockingIOError as error:
        raise DflashError("is in use by another training", where=root) from error
    except OSError as error:
        publish.remove_empty(created)
        raise publish.file_error(error, root) from error
    work = WorkFolder(root)
    try:
        yield work
    except OSError as error:
        raise publish.file_error(error, Path(error.filename or root)) from error
    finally:
        if created and work.is_worthless:
            shutil.rmtree(root, ignore_errors=True)
            publish.remove_empty(created)
        os.close(lock)

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_trt.core import publish
from dflash_trt.core.files import resolved
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.errors import DflashError

_MANIFEST = "stage.json"
_KEY_CHARACTERS = 12
_STAGE = re.compile(rf"([a-z]+)-[0-9a-f]{{{_KEY_CHARACTERS}}}")
_GONE = ".gone-"


def digest(parts: Mapping[str, Any]) -> str:
    """A hash of JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Replaces a file by `value`; a kill leaves the old one or the new one."""
    publish.replace_file(path, (json.dumps(value, indent=2) + "\n").encode(), durable=True)


class StageFolder:
    """A stage's folder, where it works and where its result stays; `key` decides the result."""

    def __init__(self, root: Path, name: str, key: str) -> None:
        self.key = key
        self.folder = root / f"{name}-{key[:_KEY_CHARACTERS]}"
        self.folder.mkdir(exist_ok=True)

    @property
    def record(self) -> dict[str, Any] | None:
        """What `finish` noted; None for a stage that is not finished."""
        path = self.folder / _MANIFEST
        if not path.is_file():
            return None
        record = read_json_object(path)
        return record if record.get("key") == self.key else None

    def finish(self, record: Mapping[str, Any]) -> None:
        """Marks the stage as finished."""
        write_json(self.folder / _MANIFEST, {"key": self.key, **record})


class WorkFolder:
    """The folder of one output's training; see `open_work`.

    Attributes:
        is_refused: set where the plan cannot be carried out; what a new folder holds goes then.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.is_refused = False
        for gone in root.glob(f"{_GONE}*"):
            shutil.rmtree(gone, ignore_errors=True)

    def stage(
        self, name: str, parts: Mapping[str, Any], *, keep_others: bool = False
    ) -> StageFolder:
        """The stage `name` of `parts`; what it left for other parts goes, unless `keep_others`."""
        stage = StageFolder(self.root, name, digest(parts))
        if not keep_others:
            for other in self._stages():
                if _stage_name(other) == name and other != stage.folder:
                    self._remove(other)
        return stage

    def keep_only(self, *names: str) -> None:
        """Removes every stage but those; what somebody else put here stays."""
        for folder in self._stages():
            if _stage_name(folder) not in names:
                self._remove(folder)

    def _stages(self) -> list[Path]:
        return [one for one in self.root.iterdir() if one.is_dir() and _stage_name(one)]

    def _remove(self, folder: Path) -> None:
        """Removes a stage: a kill meanwhile leaves no half of it under its name."""
        gone = self.root / f"{_GONE}{folder.name}"
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    @property
    def is_worthless(self) -> bool:
        """Whether it holds nothing that took long: no answer and no features."""
        answers = (path.stat().st_size for path in self.root.glob("answers-*/*.jsonl"))
        return not any(answers) and next(self.root.glob(f"features-*/{_MANIFEST}"), None) is None


def _stage_name(folder: Path) -> str | None:
    """The stage whose folder that may be; None for others."""
    found = _STAGE.fullmatch(folder.name)
    return None if found is None else found[1]


def work_folder(output: Path) -> Path:
    """Where the training of `output` works if nothing is said."""
    return output.parent / f".{output.name}.work"


@contextmanager
def open_work(root: Path) -> Iterator[WorkFolder]:
    """Makes or opens a work folder, for one process at a time.

    What ends before the first answer, or is refused, leaves nothing; later, the work stays.

    Raises:
        DflashError: it cannot be written, is something else, or is in use.
    """
    root = resolved(root)
    created = publish.missing_folders(root)
    if root.exists() and not root.is_dir():
        raise DflashError("is a file, not a folder", where=root, usage=True)
    if root.is_dir() and any(root.iterdir()) and not (root / "lock").exists():
        fix = "pass an empty or a new one"
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
        if created and (work.is_refused or work.is_worthless):
            shutil.rmtree(root, ignore_errors=True)
            publish.remove_empty(created)
        os.close(lock)

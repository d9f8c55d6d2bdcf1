"""Costly files of a test run: made by the first worker that asks, read by all."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec

from filelock import FileLock

Given = ParamSpec("Given")


class Shared:
    """Folders below `root`, a temporary folder of this run; each is made once."""

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self._root = root

    def folder(
        self,
        make: Callable[Concatenate[Path, Given], None],
        *given: Given.args,
        **named: Given.kwargs,
    ) -> Path:
        """The folder that `make` fills for these arguments (JSON); nobody may change it.

        The function's name and the arguments are the key. A folder appears whole or not at all.
        """
        key = json.dumps([make.__module__, make.__qualname__, given, named], sort_keys=True)
        folder = self._root / hashlib.sha256(key.encode()).hexdigest()[:16]
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                partial = folder.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)  # of a call that failed
                partial.mkdir()
                make(partial, *given, **named)
                partial.rename(folder)
        return folder

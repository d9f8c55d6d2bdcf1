"""Files that make the next run faster and may be lost: compiled kernels."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from dflash_trt.core.publish import replace_file

FOLDER = "dflash-trt"


def user_cache_file(name: str) -> Path:
    """Path of `name` in the user's cache folder (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    except RuntimeError:  # a container's user without a home: nothing is found, nothing is kept
        root = Path(os.devnull)
    return root / FOLDER / name


def read_cache(path: Path) -> bytes:
    """The file's bytes; none when it is not there or cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def write_cache(path: Path, data: bytes) -> None:
    """Replaces the file in one step. A disk that refuses costs time at the next run, no more."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)

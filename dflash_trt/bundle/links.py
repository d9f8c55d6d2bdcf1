"""Puts a large file into a bundle without copying it where the filesystem allows."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from dflash_trt.errors import DflashError

# Linux's ioctl to share another file's extents (reflink), include/uapi/linux/fs.h.
_FICLONE = 0x40049409
_COPY_CHUNK = 16 << 20

Placement = Literal["linked", "cloned", "copied"]


def place_file(
    source: Path, destination: Path, *, copy: bool, on_bytes: Callable[[int], None]
) -> Placement:
    """Hard-links `source` (its resolved blob), else reflinks it, else copies it.

    `copy` asks for a real file of its own, reflinked where possible. `on_bytes` hears of every
    chunk copied. Hard links are preferred because ONNX Runtime refuses symbolic links that
    leave the model's folder.

    Raises:
        DflashError: not enough space for a copy; checked before the first byte.
    """
    blob = source.resolve()
    if not copy:
        try:
            os.link(blob, destination)
            return "linked"
        except OSError:
            pass  # another filesystem, or one without links
    if _clone(blob, destination):
        return "cloned"
    _check_space(blob, destination)
    with blob.open("rb") as reader, destination.open("wb") as writer:
        while chunk := reader.read(_COPY_CHUNK):
            writer.write(chunk)
            on_bytes(len(chunk))
    return "copied"


def must_copy(source: Path, folder: Path, *, copy: bool) -> bool:
    """Whether placing `source` into `folder` will take a copy's time and space."""
    if copy:
        return True
    return source.resolve().stat().st_dev != folder.stat().st_dev


def _clone(blob: Path, destination: Path) -> bool:
    try:
        with blob.open("rb") as reader, destination.open("wb") as writer:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        return True
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        destination.unlink(missing_ok=True)
        return False


def _check_space(blob: Path, destination: Path) -> None:
    size = blob.stat().st_size
    free = shutil.disk_usage(destination.parent).free
    if size > free:
        raise DflashError(
            f"copying {blob.name} needs {size:,} bytes, {free:,} are free",
            where=destination.parent,
            fix="put the bundle on the checkpoint's filesystem (files are linked there)",
        )

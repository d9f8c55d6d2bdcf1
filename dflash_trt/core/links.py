"""Puts large files into a bundle without copying them where the filesystem allows."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from dflash_trt.core.files import find_file, open_file
from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError

_COPY_CHUNK = 16 << 20


def link_file(source: Path, destination: Path) -> bool:
    """Hard-links `source` (its resolved blob); False where that cannot be done.

    Hard links come first because ONNX Runtime refuses symbolic links that leave the model's
    folder. They fail across filesystems, and on files of other users (protected_hardlinks).
    """
    try:
        os.link(find_file(source), destination)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        return False
    return True


def copy_file(source: Path, destination: Path, on_bytes: Callable[[int], None]) -> None:
    """Copies `source`; `on_bytes` is told the size of each chunk."""
    with open_file(source) as reader, destination.open("wb") as writer:
        while chunk := reader.read(_COPY_CHUNK):
            writer.write(chunk)
            on_bytes(len(chunk))


def place_files(
    files: Mapping[Path, Path],
    destination: Path,
    what: str,
    progress: Progress,
    *,
    apart: Collection[Path] = (),
) -> bool:
    """Brings files into a folder: hard-linked, else copied.

    `files` has their sources by where they go, those `apart` get no hard link; `destination` is
    what an error about space names. Returns whether any became a file of its own.
    """
    progress.stage(f"linking {what}", None)
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
    own = {p: s for p, s in files.items() if p in apart or not link_file(s, p)}
    if own:
        # The size is known, and known to fit, before the first byte.
        progress.stage(f"copying {what}", check_copies(own.values(), destination))
        for path, source in own.items():
            copy_file(source, path, progress.advance)
    return bool(own)


def check_copies(sources: Iterable[Path], destination: Path) -> int:
    """The bytes that copies of all `sources` take; DflashError where they do not fit."""
    size = sum(source.stat().st_size for source in sources)
    fix = "free some space, or put the bundle on the checkpoint's filesystem"
    check_space(size, destination.parent, destination, "copying the weights needs", fix)
    return size


def check_space(
    size: int,
    folder: Path,
    where: Path,
    what: str = "needs",
    fix: str = "free some space",
) -> None:
    """Raises DflashError at `where` unless `size` bytes fit into `folder`."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DflashError(f"{what} {size:,} bytes, {free:,} are free", where=where, fix=fix)

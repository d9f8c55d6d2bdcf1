"""Folders that appear whole or not at all: their destination, their lock and the final rename."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from dflash_trt.errors import DflashError

_LOCK_NAME = "lock"
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def check_destination(destination: Path, *, overwrite: bool, marker: str, kind: str) -> None:
    """Raises DflashError (usage) when nothing may be put at `destination`.

    Only a folder that has the file `marker`, and so is a `kind` ("a bundle"), is overwritten.
    """
    for parent in destination.parents:
        if parent.exists() and not parent.is_dir():
            raise DflashError("is a file, not a folder", where=parent, usage=True)
    if not destination.exists():
        return
    if not overwrite:
        raise _taken(destination, "already exists")
    if not (destination / marker).is_file():
        raise DflashError(
            f"exists and is not {kind}; it is not overwritten", where=destination, usage=True
        )


def publish(new: Path, replaced: Path, destination: Path, *, overwrite: bool) -> None:
    """Renames `new` to `destination`, never over what another process just put there.

    What is overwritten becomes `replaced`; it is put back if the rename fails.
    """
    if overwrite:
        # Two renames: the destination is missing for an instant, but never half-written.
        with suppress(FileNotFoundError):
            destination.rename(replaced)
    try:
        new.rename(destination)
    except OSError as error:
        if error.errno in _TAKEN:
            raise _taken(destination, "was built by another process meanwhile") from error
        with suppress(OSError):
            replaced.rename(destination)
        raise


def lock_folder(folder: Path, *, wait: bool) -> int:
    """Locks a temporary folder until the descriptor is closed or the process ends.

    The lock counts only if its file is still there: the last holder may have removed it.

    Raises:
        FileNotFoundError: the folder is gone by the time it is locked.
        BlockingIOError: another process holds the lock, and `wait` is false.
    """
    path = folder / _LOCK_NAME
    lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), path.stat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    except OSError:
        os.close(lock)
        raise
    return lock


def missing_folders(folder: Path) -> list[Path]:
    """`folder` and those above it that do not exist, the innermost first."""
    return [parent for parent in [folder, *folder.parents] if not parent.exists()]


def remove_empty(folders: list[Path]) -> None:
    """Removes what is empty of `folders`, the innermost first."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def file_error(error: OSError, where: Path) -> DflashError:
    """One line for a file operation that failed at `where`."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = "free some space; nothing was left behind" if full else None
    return DflashError(error.strerror or str(error), where=where, fix=fix)


def _taken(destination: Path, what: str) -> DflashError:
    return DflashError(
        what, where=destination, fix="choose another -o or add --overwrite", usage=True
    )

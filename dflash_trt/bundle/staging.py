"""A folder that appears whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_trt.errors import DflashError

# Inside the temporary folder: its lock, what is being built, and the bundle it replaces.
_LOCK_NAME = "lock"
_NEW_NAME = "bundle"
_OLD_NAME = "replaced"

_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


@contextmanager
def staged_folder(destination: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yields a temporary folder beside `destination` that replaces it on success.

    On an exception nothing remains. A build that was killed leaves its temporary folder
    unlocked; the next build of the same destination removes it.

    Raises:
        DflashError: `destination` exists (without `overwrite`), is no folder to replace, cannot
            be written, or was built by another process in the meantime.
    """
    destination = destination.resolve()
    check_destination(destination, overwrite=overwrite)
    parents = [destination.parent, *destination.parent.parents]
    created = [parent for parent in parents if not parent.exists()]
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(destination)
        staging, lock = _make_locked(destination)
    except OSError as error:
        _remove_empty(created)
        raise _file_error(error, destination.parent) from error
    try:
        (staging / _NEW_NAME).mkdir()
        yield staging / _NEW_NAME
        _publish(staging, destination, overwrite=overwrite)
    except OSError as error:
        # A file of the bundle is of no interest under its temporary name.
        file = error.filename
        outside = isinstance(file, str) and not Path(file).is_relative_to(staging)
        raise _file_error(error, Path(file) if outside else destination) from error
    finally:
        os.close(lock)
        shutil.rmtree(staging, ignore_errors=True)
        _remove_empty(created)


def check_destination(destination: Path, *, overwrite: bool) -> None:
    """Raises DflashError (usage) when nothing may be put at `destination`."""
    for parent in destination.parents:
        if parent.exists() and not parent.is_dir():
            raise DflashError("is a file, not a folder", where=parent, usage=True)
    if not destination.exists():
        return
    if not overwrite:
        raise _taken(destination, "already exists")
    if not (destination / "manifest.json").is_file():
        raise DflashError(
            "exists and is not a bundle; it is not overwritten", where=destination, usage=True
        )


def _publish(staging: Path, destination: Path, *, overwrite: bool) -> None:
    """Renames the new folder to `destination`, never over what another build just put there."""
    if overwrite:
        # Two renames: the destination is missing for an instant, but never half-written.
        with suppress(FileNotFoundError):
            destination.rename(staging / _OLD_NAME)
    try:
        (staging / _NEW_NAME).rename(destination)
    except OSError as error:
        if error.errno in _TAKEN:
            raise _taken(destination, "was built by another process meanwhile") from error
        with suppress(OSError):
            (staging / _OLD_NAME).rename(destination)
        raise


def _make_locked(destination: Path) -> tuple[Path, int]:
    """A temporary folder, and the descriptor whose lock says that its build is running."""
    while True:
        staging = Path(tempfile.mkdtemp(prefix=_prefix(destination), dir=destination.parent))
        # Another build may take the folder for abandoned before it is locked.
        with suppress(FileNotFoundError):
            return staging, _lock(staging, wait=True)


def _remove_abandoned(destination: Path) -> None:
    for staging in destination.parent.glob(f"{glob.escape(_prefix(destination))}*"):
        with suppress(OSError):  # a build that is still running, or just removed
            lock = _lock(staging, wait=False)
            shutil.rmtree(staging, ignore_errors=True)
            os.close(lock)


def _lock(staging: Path, *, wait: bool) -> int:
    """Locks a temporary folder; FileNotFoundError when it is gone by the time it is locked.

    Whoever held the lock before may have removed the file that was opened here, and another may
    lie in its place: only the file that is still there says anything about the folder.
    """
    path = staging / _LOCK_NAME
    lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), path.stat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    except OSError:
        os.close(lock)
        raise
    return lock


def _prefix(destination: Path) -> str:
    return f".{destination.name}.building-"


def _remove_empty(folders: list[Path]) -> None:
    """Removes what is empty of `folders`, the innermost first."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _taken(destination: Path, what: str) -> DflashError:
    return DflashError(
        what, where=destination, fix="choose another -o or add --overwrite", usage=True
    )


def _file_error(error: OSError, where: Path) -> DflashError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = "free some space; nothing was left behind" if full else None
    return DflashError(error.strerror or str(error), where=where, fix=fix)

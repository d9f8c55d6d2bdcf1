"""A folder that appears whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_trt.errors import DflashError

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
    _check_destination(destination, overwrite)
    prefix = f".{destination.name}.building-"
    parents = [destination.parent, *destination.parent.parents]
    created = [parent for parent in parents if not parent.exists()]
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(destination.parent, prefix)
        staging, lock = _make_locked(destination.parent, prefix)
    except OSError as error:
        _remove_empty(created)
        raise _write_error(error, destination.parent) from error
    try:
        staging.chmod(0o755)
        yield staging
        _publish(staging, destination, prefix, overwrite=overwrite)
    except OSError as error:
        inside = error.filename is None or Path(str(error.filename)).is_relative_to(staging)
        raise _write_error(error, destination if inside else Path(error.filename)) from error
    finally:
        os.close(lock)
        shutil.rmtree(staging, ignore_errors=True)
        _remove_empty(created)


def _check_destination(destination: Path, overwrite: bool) -> None:
    if not destination.exists():
        return
    if not overwrite:
        raise _taken(destination)
    if not (destination / "manifest.json").is_file():
        raise DflashError(
            "exists and is not a bundle; it is not overwritten", where=destination, usage=True
        )


def _make_locked(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder and the descriptor whose lock says that its build is running."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = _lock(folder, wait=True)
        # Another build may have taken it for abandoned before it was locked.
        if lock is not None and folder.exists():
            return folder, lock
        if lock is not None:
            os.close(lock)


def _lock(folder: Path, *, wait: bool) -> int | None:
    """A descriptor that locks `folder`; None when it is gone or (unless `wait`) locked."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno == errno.EWOULDBLOCK:
            return None
        raise
    return lock


def _publish(staging: Path, destination: Path, prefix: str, *, overwrite: bool) -> None:
    """Renames `staging` to `destination`; never over what another build put there meanwhile."""
    old = destination.with_name(f"{prefix}{secrets.token_hex(6)}")
    if overwrite:
        # The destination is missing for an instant, but never half-written. Under the old
        # bundle's new name the next build would clear it away, were this one killed here.
        with suppress(FileNotFoundError):
            destination.rename(old)
    try:
        staging.rename(destination)
    except OSError as error:
        if error.errno in _TAKEN:
            raise _taken(destination, "was built by another process meanwhile") from error
        with suppress(OSError):
            old.rename(destination)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{glob.escape(prefix)}*"):
        lock = _lock(folder, wait=False)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _remove_empty(folders: list[Path]) -> None:
    """Removes the innermost of `folders` first, as far as they are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _taken(destination: Path, what: str = "already exists") -> DflashError:
    return DflashError(
        what, where=destination, fix="choose another -o or add --overwrite", usage=True
    )


def _write_error(error: OSError, where: Path) -> DflashError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = "free some space; nothing was left behind" if full else None
    return DflashError(f"{error.strerror or error}", where=where, fix=fix)

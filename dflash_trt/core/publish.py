"""Writes files and folders that appear complete or not at all: lock, temporary name, rename."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dflash_trt.core.files import resolved
from dflash_trt.errors import DflashError

# In a temporary folder: its lock, what is being built, and what that replaces.
_LOCK_NAME, _NEW_NAME, _OLD_NAME = "lock", "new", "replaced"
# Linux's renameat2, include/uapi/linux/fcntl.h and fs.h.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


@dataclass(frozen=True, slots=True)
class StagedKind:
    """What is built: its name, and the file by which one that exists is known and replaced."""

    name: str
    marker: str


BUNDLE = StagedKind("bundle", "manifest.json")


def check_destination(destination: Path, *, overwrite: bool, kind: StagedKind = BUNDLE) -> None:
    """Raises DflashError (usage) when nothing may be put at `destination`.

    Only a folder that has the marker of `kind` is overwritten.
    """
    for parent in destination.parents:
        if parent.exists() and not parent.is_dir():
            raise DflashError("is a file, not a folder", where=parent, usage=True)
    if not destination.exists():
        return
    if not overwrite:
        raise _taken(destination, "already exists")
    if not (destination / kind.marker).is_file():
        what = f"exists and is not a {kind.name}; it is not overwritten"
        raise DflashError(what, where=destination, usage=True)
    with suppress(OSError):  # a filesystem without locks tells nothing
        folder = os.open(destination, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            fix = "choose another -o, or end the server first"
            raise DflashError("is being served", where=destination, fix=fix, usage=True) from error
        finally:
            os.close(folder)


def hold_folder(folder: Path) -> int:
    """Keeps `folder` from being overwritten until the descriptor is closed or the process ends."""
    held = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return held


@contextmanager
def staged_folder(
    destination: Path, *, overwrite: bool, kind: StagedKind = BUNDLE
) -> Iterator[Path]:
    """Yields a temporary folder beside `destination` that replaces it on success.

    On an exception nothing remains. A build that was killed leaves its temporary folder
    unlocked; the next build of the same destination removes it.

    Raises:
        DflashError: `destination` exists (without `overwrite`), is no folder to replace, cannot
            be written, or was built by another process in the meantime.
    """
    destination = resolved(destination)
    prefix = f".{destination.name}.building-"
    for abandoned in destination.parent.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError):  # a build that is still running, or just removed
            lock = lock_folder(abandoned, wait=False)
            try:
                put_back(abandoned, destination)
                shutil.rmtree(abandoned, ignore_errors=True)
            finally:
                os.close(lock)
    check_destination(destination, overwrite=overwrite, kind=kind)
    created = missing_folders(destination.parent)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        staging, lock = _make_locked(prefix, destination.parent)
    except OSError as error:
        remove_empty(created)
        raise file_error(error, destination.parent) from error
    try:
        with publishing(staging / _NEW_NAME, destination, overwrite=overwrite):
            (staging / _NEW_NAME).mkdir()
            yield staging / _NEW_NAME
    finally:
        os.close(lock)
        shutil.rmtree(staging, ignore_errors=True)
        remove_empty(created)


@contextmanager
def publishing(new: Path, destination: Path, *, overwrite: bool) -> Iterator[None]:
    """Renames `new`, of a temporary folder, to `destination` at the end.

    Errors about files of the temporary folder name `destination`; see `put_back` for a kill.
    """
    try:
        yield
        _publish(new, destination, overwrite=overwrite)
    except OSError as error:
        file = error.filename
        outside = isinstance(file, str) and not Path(file).is_relative_to(new.parent)
        raise file_error(error, Path(file) if outside else destination) from error


def put_back(temporary: Path, destination: Path) -> None:
    """Undoes half an overwriting: the run was killed between its two renames."""
    if (temporary / _OLD_NAME).exists() and not destination.exists():
        (temporary / _OLD_NAME).rename(destination)


def _publish(new: Path, destination: Path, *, overwrite: bool) -> None:
    """Renames `new` to `destination`, never over what another process just put there.

    What is overwritten lies beside `new` afterwards; it is put back if the rename fails.
    """
    replaced = new.with_name(_OLD_NAME)
    if overwrite:
        if _exchange(new, destination):
            return
        # Two renames: the destination is missing for an instant, see `put_back`.
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


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A new file beside `path` to write to, which takes its place at the end.

    A failure or a kill leaves the old file or the new one, whole. With `durable` that holds when
    the machine loses power too. Writers of one file wait for each other.
    """
    new = path.with_name(f".{path.name}.new")
    with _open_locked(new) as file:
        try:
            file.truncate()
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def replace_file(path: Path, content: bytes, *, durable: bool = False) -> None:
    """The same for content that is at hand."""
    with replacing(path, durable=durable) as file:
        file.write(content)


def write_named(path: Path, content: bytes) -> None:
    """The same for a file that somebody asked for; DflashError where it cannot be written."""
    try:
        replace_file(path, content)
    except OSError as error:
        raise file_error(error, path) from error


def _exchange(new: Path, destination: Path) -> bool:
    """Swaps two paths in one step; False where that cannot be done."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    paths = os.fsencode(new), os.fsencode(destination)
    return rename is not None and not rename(
        _AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE
    )


def _open_locked(path: Path) -> BinaryIO:
    """Opens a file to write to, when nobody else does; what a killed run left in it is there."""
    while True:
        file = os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666), "wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            # The last writer may have renamed it meanwhile.
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


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


def _make_locked(prefix: str, parent: Path) -> tuple[Path, int]:
    """A temporary folder, and the descriptor whose lock says that its build is running."""
    while True:
        staging = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Another build may take the folder for abandoned before it is locked.
        with suppress(FileNotFoundError):
            return staging, lock_folder(staging, wait=True)


def _taken(destination: Path, what: str) -> DflashError:
    return DflashError(
        what, where=destination, fix="choose another -o or add --overwrite", usage=True
    )

"""A folder that appears whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_trt.errors import DflashError

_LOCK_NAME = ".building"


@contextmanager
def staged_folder(destination: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yields a temporary folder beside `destination` that replaces it on success.

    On an exception nothing remains. A build that was killed leaves its temporary folder
    unlocked; the next build of the same destination removes it.

    Raises:
        DflashError: `destination` exists (without `overwrite`), is no folder to replace, or
            cannot be written.
    """
    destination = destination.absolute()
    if destination.exists() and not overwrite:
        raise DflashError(
            "already exists",
            where=destination,
            fix="choose another -o or add --overwrite",
            usage=True,
        )
    if overwrite and destination.exists() and not (destination / "manifest.json").is_file():
        raise DflashError(
            "exists and is not a bundle; it is not overwritten", where=destination, usage=True
        )
    prefix = f".{destination.name}.building-"
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(destination.parent, prefix)
        staging = Path(tempfile.mkdtemp(prefix=prefix, dir=destination.parent))
    except OSError as error:
        raise _write_error(error, destination.parent) from error
    lock = os.open(staging / _LOCK_NAME, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        staging.chmod(0o755)
        yield staging
        (staging / _LOCK_NAME).unlink()
        _replace(staging, destination)
    except OSError as error:
        raise _write_error(error, destination) from error
    finally:
        os.close(lock)
        shutil.rmtree(staging, ignore_errors=True)


def _replace(staging: Path, destination: Path) -> None:
    if destination.exists():
        # Two renames: the destination is missing for an instant, but never half-written.
        old = Path(tempfile.mkdtemp(prefix=f".{destination.name}.old-", dir=destination.parent))
        destination.rename(old / "bundle")
        staging.rename(destination)
        shutil.rmtree(old)
    else:
        staging.rename(destination)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        try:
            lock = os.open(folder / _LOCK_NAME, os.O_RDWR)
        except OSError:
            continue  # being made or removed this moment
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # a build that is still running
        finally:
            os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _write_error(error: OSError, where: Path) -> DflashError:
    fix = "free some space; nothing was left behind" if error.errno == 28 else None
    return DflashError(f"cannot be written: {error.strerror or error}", where=where, fix=fix)

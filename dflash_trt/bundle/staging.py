"""A folder that appears whole or not at all."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.core import publish
from dflash_trt.core.files import resolved

# Inside the temporary folder, beside its lock: what is being built, and what that replaces.
_NEW_NAME = "new"
_OLD_NAME = "replaced"


@dataclass(frozen=True, slots=True)
class StagedKind:
    """What is built: its name, and the file by which one that exists is known and replaced."""

    name: str
    marker: str


BUNDLE = StagedKind("bundle", "manifest.json")


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
    _remove_abandoned(destination)
    check_destination(destination, overwrite=overwrite, kind=kind)
    created = publish.missing_folders(destination.parent)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        staging, lock = _make_locked(destination)
    except OSError as error:
        publish.remove_empty(created)
        raise publish.file_error(error, destination.parent) from error
    try:
        (staging / _NEW_NAME).mkdir()
        yield staging / _NEW_NAME
        publish.publish(staging / _NEW_NAME, staging / _OLD_NAME, destination, overwrite=overwrite)
    except OSError as error:
        # A file of the bundle is of no interest under its temporary name.
        file = error.filename
        outside = isinstance(file, str) and not Path(file).is_relative_to(staging)
        raise publish.file_error(error, Path(file) if outside else destination) from error
    finally:
        os.close(lock)
        shutil.rmtree(staging, ignore_errors=True)
        publish.remove_empty(created)


def check_destination(destination: Path, *, overwrite: bool, kind: StagedKind = BUNDLE) -> None:
    """Raises DflashError (usage) when nothing may be put at `destination`."""
    publish.check_destination(
        destination, overwrite=overwrite, marker=kind.marker, kind=f"a {kind.name}"
    )


def _make_locked(destination: Path) -> tuple[Path, int]:
    """A temporary folder, and the descriptor whose lock says that its build is running."""
    while True:
        staging = Path(tempfile.mkdtemp(prefix=_prefix(destination), dir=destination.parent))
        # Another build may take the folder for abandoned before it is locked.
        with suppress(FileNotFoundError):
            return staging, publish.lock_folder(staging, wait=True)


def _remove_abandoned(destination: Path) -> None:
    """Removes what killed builds left; what one of them was about to replace is put back."""
    for staging in destination.parent.glob(f"{glob.escape(_prefix(destination))}*"):
        with suppress(OSError):  # a build that is still running, or just removed
            lock = publish.lock_folder(staging, wait=False)
            try:
                publish.put_back(staging / _OLD_NAME, destination)
                shutil.rmtree(staging, ignore_errors=True)
            finally:
                os.close(lock)


def _prefix(destination: Path) -> str:
    return f".{destination.name}.building-"

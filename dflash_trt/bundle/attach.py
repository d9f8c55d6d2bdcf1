"""One file more or less in a finished bundle, with its entry in the manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.bundle.manifest import MANIFEST_NAME, BundleFile, Manifest
from dflash_trt.core.publish import file_error


def attach_file(bundle: Bundle, name: str, content: bytes) -> Bundle:
    """Puts a file `name` into the bundle's folder, or replaces it; returns the bundle as it is now.

    Whenever it is interrupted the bundle is whole: its manifest names the file only while that is
    the one it was written for. Files are replaced, never changed, since others may be linked to
    them.

    Raises:
        DflashError: the folder cannot be written to.
    """
    without = _without(bundle.manifest, name)
    entry = BundleFile(path=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    complete = without.model_copy(
        update={"files": sorted([*without.files, entry], key=lambda file: file.path)}
    )
    try:
        if len(without.files) < len(bundle.manifest.files):
            _write_manifest(bundle.folder, without)
        replace_file(bundle.folder / name, content)
        _write_manifest(bundle.folder, complete)
    except OSError as error:
        raise file_error(error, bundle.folder) from error
    return Bundle(bundle.folder, complete)


def detach_file(bundle: Bundle, name: str) -> Bundle:
    """Takes the file `name` out of the bundle's folder; returns the bundle as it is now.

    Whenever it is interrupted the bundle is whole, as with `attach_file`; what may be left is a
    file that the manifest does not name, which is taken out as well when this is called again.

    Raises:
        DflashError: the folder cannot be written to.
    """
    without = _without(bundle.manifest, name)
    try:
        if len(without.files) < len(bundle.manifest.files):
            _write_manifest(bundle.folder, without)
        (bundle.folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise file_error(error, bundle.folder) from error
    return Bundle(bundle.folder, without)


def _without(manifest: Manifest, name: str) -> Manifest:
    others = [file for file in manifest.files if file.path != name]
    return manifest.model_copy(update={"files": others})


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    replace_file(folder / MANIFEST_NAME, (manifest.model_dump_json(indent=2) + "\n").encode())


def replace_file(path: Path, content: bytes) -> None:
    """Writes a new file and renames it to `path`."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise

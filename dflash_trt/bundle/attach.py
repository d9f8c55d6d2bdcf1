"""One more file in a finished bundle, with its entry in the manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.bundle.manifest import MANIFEST_NAME, BundleFile, Manifest
from dflash_trt.publish import file_error


def attach_file(bundle: Bundle, name: str, content: bytes) -> Bundle:
    """Puts a file `name` into the bundle's folder, or replaces it; returns the bundle as it is now.

    Whenever it is interrupted the bundle is whole: its manifest names the file only while that is
    the one it was written for. Files are replaced, never changed, since others may be linked to
    them.

    Raises:
        DflashError: the folder cannot be written to.
    """
    others = [file for file in bundle.manifest.files if file.path != name]
    entry = BundleFile(path=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    without = bundle.manifest.model_copy(update={"files": others})
    complete = bundle.manifest.model_copy(
        update={"files": sorted([*others, entry], key=lambda file: file.path)}
    )
    try:
        if len(others) < len(bundle.manifest.files):
            _write_manifest(bundle.folder, without)
        replace_file(bundle.folder / name, content)
        _write_manifest(bundle.folder, complete)
    except OSError as error:
        raise file_error(error, bundle.folder) from error
    return Bundle(bundle.folder, complete)


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

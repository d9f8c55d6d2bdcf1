"""An opened bundle: checked against its manifest, and given or relieved of a single file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.bundle.manifest import (
    MANIFEST_NAME,
    PROMPTS_NAME,
    TOKENIZER_FOLDER,
    BundleFile,
    Manifest,
    read_manifest,
)
from dflash_trt.core.files import exists, file_sha256, find_file
from dflash_trt.core.free_memory import stay_within_memory
from dflash_trt.core.publish import file_error, replace_file
from dflash_trt.errors import DflashError
from dflash_trt.hardware.device import has_driver
from dflash_trt.models.safetensors_header import header_sha256
from dflash_trt.text.tokenizer import BundleTokenizer


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle's folder and manifest."""

    folder: Path
    manifest: Manifest

    def find(self, name: str) -> Path:
        """Where the file called `name` lies; DflashError for a link out of the bundle."""
        return find_file(self.folder / name, within=self.folder)

    @property
    def tokenizer_folder(self) -> Path | None:
        """Where tokenizer.json lies; None for a bundle of a checkpoint without one."""
        return self.folder / TOKENIZER_FOLDER if self.manifest.tokenizer else None

    @property
    def prompts(self) -> Path | None:
        """The prompts that came with the pair; None where there were none."""
        return self.find(PROMPTS_NAME) if exists(self.folder / PROMPTS_NAME) else None


def open_bundle(folder: str | Path) -> Bundle:
    """Opens a bundle and checks every file: its size, and its hash if that takes no time.

    Weights' headers are looked at, their content and that of engines is not; see `verify_bundle`.

    Raises:
        DflashError: not a bundle, or a file is missing or is not as it was built.
    """
    folder = Path(folder)
    bundle = Bundle(folder, read_manifest(folder))
    engines = bundle.manifest.engines
    large = {engine.path for engine in engines.files} if engines is not None else set()
    for file in bundle.manifest.files:
        path = folder / file.path
        if not exists(path):
            raise _damaged(path, "is missing")
        size = bundle.find(file.path).stat().st_size
        if size != file.bytes:
            raise _damaged(path, f"has {size:,} bytes, the manifest says {file.bytes:,}")
        _check_header(bundle, file)
        if file.header_sha256 is None and file.path not in large:
            _check_content(bundle, file)
    return bundle


def bound_memory(bundle: Bundle) -> None:
    """Lets this process, which will run the bundle's graphs, take no more memory than is free."""
    if bundle.manifest.is_on_cpu or (bundle.manifest.engines is None and not has_driver()):
        stay_within_memory(bundle.find(file.path) for file in bundle.manifest.files)


def verify_bundle(bundle: Bundle, on_bytes: Callable[[int], None]) -> list[str]:
    """Checks every hash the manifest has; returns what was checked, a line per file.

    `on_bytes` hears of the bytes read. Raises DflashError at the first difference.
    """
    lines: list[str] = []
    for file in bundle.manifest.files:
        checked = "sha256 matches"
        _check_header(bundle, file)
        if file.sha256 is None:
            checked = "header hash matches; content NOT checked, "
            checked += "build with --hash-weights to have it checked"
        else:
            _check_content(bundle, file, on_bytes)
        lines.append(f"{file.path}: {checked}")
    return lines


def _check_header(bundle: Bundle, file: BundleFile) -> None:
    path = bundle.find(file.path)
    if file.header_sha256 is not None and header_sha256(path) != file.header_sha256:
        raise _damaged(path, "has another safetensors header than when it was built")


def _check_content(
    bundle: Bundle, file: BundleFile, on_bytes: Callable[[int], None] | None = None
) -> None:
    path = bundle.find(file.path)
    if file.sha256 is not None and file_sha256(path, on_bytes) != file.sha256:
        raise _damaged(path, "has another content than when it was built")


def _damaged(path: Path, what: str) -> DflashError:
    return DflashError(what, where=path, fix="build the bundle again")


def load_tokenizer(bundle: Bundle) -> BundleTokenizer:
    """The bundle's tokenizer; DflashError when it was built without one."""
    folder = bundle.tokenizer_folder
    if folder is None:
        raise DflashError(
            "has no tokenizer: its target checkpoint has no tokenizer.json",
            where=bundle.folder,
            fix="add one to the checkpoint and build again",
        )
    bundle.find(f"{TOKENIZER_FOLDER}/tokenizer.json")  # the folder may be a link
    return BundleTokenizer(folder)


def attach_file(bundle: Bundle, name: str, content: bytes) -> Bundle:
    """Puts a file `name` into the bundle's folder, or replaces it; returns the bundle as it is now.

    Whenever it is interrupted the bundle is whole: its manifest names the file only while that is
    the one it was written for. Files are replaced, never changed: others may be linked to them.

    Raises:
        DflashError: the folder cannot be written to.
    """
    manifest = detach_file(bundle, name).manifest
    entry = BundleFile(path=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    files = sorted([*manifest.files, entry], key=lambda file: file.path)
    with _writing(bundle.folder):
        replace_file(bundle.folder / name, content)
        return _write_files(bundle, files)


def detach_file(bundle: Bundle, name: str) -> Bundle:
    """Takes the file `name` out of the bundle's folder; returns the bundle as it is now.

    Whenever it is interrupted the bundle is whole. What may be left is a file that the manifest
    does not name, and calling this again removes it.

    Raises:
        DflashError: the folder cannot be written to.
    """
    others = [file for file in bundle.manifest.files if file.path != name]
    with _writing(bundle.folder):
        if len(others) < len(bundle.manifest.files):
            bundle = _write_files(bundle, others)
        (bundle.folder / name).unlink(missing_ok=True)
    return bundle


def _write_files(bundle: Bundle, files: list[BundleFile]) -> Bundle:
    """Replaces the manifest by one that names `files`."""
    manifest = bundle.manifest.model_copy(update={"files": files})
    replace_file(bundle.folder / MANIFEST_NAME, manifest.encode())
    return Bundle(bundle.folder, manifest)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise file_error(error, folder) from error

"""An opened bundle: its manifest, trusted only as far as its files bear it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.bundle.manifest import PROMPTS_NAME, TOKENIZER_FOLDER, Manifest, read_manifest
from dflash_trt.checkpoints.safetensors_header import header_sha256
from dflash_trt.core.hashing import file_sha256
from dflash_trt.errors import DflashError
from dflash_trt.text.tokenizer import BundleTokenizer


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle's folder and manifest."""

    folder: Path
    manifest: Manifest

    @property
    def tokenizer_folder(self) -> Path | None:
        """Where tokenizer.json lies; None for a bundle of a checkpoint without one."""
        return self.folder / TOKENIZER_FOLDER if self.manifest.tokenizer else None

    @property
    def prompts(self) -> Path | None:
        """The prompts that came with the pair; None where there were none."""
        path = self.folder / PROMPTS_NAME
        return path if path.is_file() else None


def open_bundle(folder: str | Path) -> Bundle:
    """Opens a bundle and checks that every file is there with its size.

    Raises:
        DflashError: not a bundle, or a file is missing or has another size.
    """
    folder = Path(folder)
    bundle = Bundle(folder, read_manifest(folder))
    for file in bundle.manifest.files:
        path = folder / file.path
        if not path.is_file():
            raise _damaged(path, "is missing")
        size = path.stat().st_size
        if size != file.bytes:
            raise _damaged(path, f"has {size:,} bytes, the manifest says {file.bytes:,}")
    return bundle


def verify_bundle(bundle: Bundle, on_bytes: Callable[[int], None]) -> list[str]:
    """Checks every hash the manifest has; returns what was checked, a line per file.

    `on_bytes` hears of the bytes read. Raises DflashError at the first difference.
    """
    lines: list[str] = []
    for file in bundle.manifest.files:
        path = bundle.folder / file.path
        if file.header_sha256 is not None and header_sha256(path) != file.header_sha256:
            raise _damaged(path, "has another safetensors header than when it was built")
        if file.sha256 is not None:
            if file_sha256(path, on_bytes) != file.sha256:
                raise _damaged(path, "has another content than when it was built")
            lines.append(f"{file.path}: sha256 matches")
        else:
            lines.append(
                f"{file.path}: header hash matches; content NOT checked, "
                "build with --hash-weights to have it checked"
            )
    return lines


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
    return BundleTokenizer(folder)

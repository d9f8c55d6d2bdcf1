"""SHA-256 of a bundle's files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from dflash_trt.core.files import open_file

_SHA256 = re.compile(r"[0-9a-f]{64}")


def file_sha256(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file, hex, read in chunks."""
    digest = hashlib.sha256()
    with open_file(path) as reader:
        while chunk := reader.read(4 << 20):
            digest.update(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    return digest.hexdigest()


def blob_sha256(file: Path) -> str | None:
    """The hash that the Hugging Face cache gave a blob as its name; None for other files."""
    return file.name if _SHA256.fullmatch(file.name) and file.parent.name == "blobs" else None

"""The one way to a file that came with a checkpoint, with a bundle or on the command line.

Such a file may be anything: a pipe that never ends, a device, a link to the user's own keys, a
sparse file larger than memory. Only regular files are opened, no link leads out of their folder,
and of each kind there is a size that none is larger than.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from dflash_trt.errors import DflashError, one_line

_MIB = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class FileKind(Enum):
    """What a file is, and the most bytes that one may have; what is known is far below."""

    CONFIG = ("a configuration", 16 * _MIB)
    YAML = ("a configuration in YAML", _MIB)
    INDEX = ("an index of shards", 64 * _MIB)
    MANIFEST = ("a manifest", 16 * _MIB)
    TOKENIZER = ("a tokenizer", 128 * _MIB)
    TEMPLATE = ("a chat template", _MIB)
    PROMPTS = ("a file of prompts", 64 * _MIB)
    DATA_SET = ("a data set", 256 * _MIB)
    GRAPH = ("a graph", 256 * _MIB)
    KEYS = ("API keys", 4 * _MIB)
    PEM = ("a certificate or its key", 4 * _MIB)

    def __init__(self, text: str, limit: int) -> None:
        self.text, self.limit = text, limit


def exists(path: Path) -> bool:
    """Whether anything has that name, a broken link too: then reading it says what is wrong."""
    return os.path.lexists(path)


def resolved(path: str | Path) -> Path:
    """`path` without links. Links in a circle stay, and whatever opens them fails: `Path.resolve`
    ends in a RuntimeError there."""
    return Path(os.path.realpath(path))


def find_file(
    path: str | Path,
    kind: FileKind | None = None,
    *,
    within: Path | None = None,
    named: bool = False,
) -> Path:
    """The regular file at `path`, links resolved, for libraries that take a path.

    `within` is the folder that no link may lead out of, the file's own by default. A file that
    the user named may lie anywhere, and a bad one is wrong usage.

    Raises:
        DflashError: there is none, it is no regular file, a link leads out of the folder, or it is
            larger than a `kind` can be.
    """
    path = Path(path)
    try:
        real = path.resolve()  # in a circle of links this fails
        status = real.stat()
    except (FileNotFoundError, NotADirectoryError):
        what = "is a link to nothing" if path.is_symlink() else "no such file"
        raise DflashError(what, where=path, usage=named) from None
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
        raise _unreadable(path, error, named) from None
    if not stat.S_ISREG(status.st_mode):
        raise _not_regular(path, status.st_mode, named)
    if not named:
        _check_links(path, real, resolved(within or path.parent))
    if kind is not None and status.st_size > kind.limit:
        raise _too_large(path, kind, named)
    return real


def open_file(path: str | Path, *, within: Path | None = None, named: bool = False) -> BinaryIO:
    """Opens what `find_file` finds, for reading."""
    path = Path(path)
    try:
        # What was found may have become a link or a pipe: neither is followed or waited for.
        descriptor = os.open(find_file(path, within=within, named=named), _FLAGS)
    except OSError as error:
        raise _unreadable(path, error, named) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _not_regular(path, mode, named)
    return os.fdopen(descriptor, "rb")


def read_bytes(
    path: str | Path, kind: FileKind, *, within: Path | None = None, named: bool = False
) -> bytes:
    """The content of a file of that `kind`, opened as `open_file` does.

    Raises:
        DflashError: as `find_file`; or it is larger than such a file can be.
    """
    try:
        with open_file(path, within=within, named=named) as file:
            size = os.fstat(file.fileno()).st_size
            # Files as those in /proc state no size, and have one.
            data = b"" if size > kind.limit else file.read((size or kind.limit) + 1)
    except OSError as error:
        raise _unreadable(Path(path), error, named) from None
    if max(size, len(data)) > kind.limit:
        raise _too_large(path, kind, named)
    return data


def read_text(
    path: str | Path, kind: FileKind, *, within: Path | None = None, named: bool = False
) -> str:
    """The same as text; raises DflashError also for what is not UTF-8."""
    try:
        return read_bytes(path, kind, within=within, named=named).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DflashError(f"is not UTF-8 at byte {error.start}", where=path, usage=named) from None


def copy_small(source: Path, destination: Path, kind: FileKind, *, named: bool = False) -> None:
    """Copies a file of that `kind`, read as `read_bytes` does; its mode and times stay behind."""
    destination.write_bytes(read_bytes(source, kind, named=named))


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


def _check_links(path: Path, real: Path, folder: Path) -> None:
    """Refuses a file outside of `folder`, unless it is a blob of that snapshot of the hub's."""
    if real.is_relative_to(folder):
        return
    for snapshot in (folder, *folder.parents):
        # models--OWNER--NAME/snapshots/REVISION/... has links to models--OWNER--NAME/blobs/HASH.
        if snapshot.parent.name == "snapshots":
            if real.parent == snapshot.parent.parent / "blobs":
                return
            break
    what = f"is a link out of its folder, to {one_line(real, 200)}"
    fix = "put the file itself in its place"
    raise DflashError(what, where=path, fix=fix)


def _not_regular(path: Path, mode: int, named: bool) -> DflashError:
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return DflashError(f"is {kind}, not a regular file", where=path, usage=named)


def _too_large(path: str | Path, kind: FileKind, named: bool) -> DflashError:
    what = f"is larger than {kind.limit >> 20} MiB, too large for {kind.text}"
    return DflashError(what, where=path, fix="check that this is the right file", usage=named)


def _unreadable(path: Path, error: Exception, named: bool) -> DflashError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
    return DflashError(f"cannot be read ({reason})", where=path, usage=named)

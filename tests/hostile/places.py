"""Files that are no regular files, too large, or links to what is somebody else's."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from tests.hostile.case import SECRET


def leads_out(path: Path, outside: Path) -> None:
    """To what was there, with a secret in it where that can stand."""
    if path.is_dir():
        shutil.move(path, outside / "x")
    elif path.exists():
        (outside / "x").write_bytes(path.read_bytes())
        path.unlink()
    else:
        (outside / "x").write_text(SECRET)
    path.symlink_to(outside / "x")


def leads_out_to_a_secret(path: Path, outside: Path) -> None:
    _remove(path)
    (outside / "x").write_text(f'{{"a": "{SECRET}"}}\n')
    path.symlink_to(outside / "x")


def leads_to_a_folder_of_secrets(path: Path, outside: Path) -> None:
    _remove(path)
    (outside / "tokenizer.json").write_text(SECRET)
    path.symlink_to(outside)


def leads_nowhere(path: Path, outside: Path) -> None:
    _remove(path)
    path.symlink_to(outside / "nothing")


def leads_to_itself(path: Path, outside: Path) -> None:
    _remove(path)
    path.symlink_to(path.name)


def is_a_pipe(path: Path, outside: Path) -> None:
    _remove(path)
    os.mkfifo(path)


def is_a_socket(path: Path, outside: Path) -> None:
    _remove(path)
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's name is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def is_a_folder(path: Path, outside: Path) -> None:
    _remove(path)
    path.mkdir()


def never_ends(path: Path, outside: Path) -> None:
    _remove(path)
    path.symlink_to("/dev/zero")


def is_said_by_the_kernel(path: Path, outside: Path) -> None:
    _remove(path)
    path.symlink_to("/proc/self/environ")


def is_sparse_and_large(path: Path, outside: Path) -> None:
    if path.is_dir():
        _remove(path)
    with path.open("ab") as file:
        file.truncate(5 << 29)


def cannot_be_read(path: Path, outside: Path) -> None:
    _remove(path)
    path.write_bytes(b"\0")
    path.chmod(0)


def is_empty(path: Path, outside: Path) -> None:
    _remove(path)
    path.touch()


def is_gone(path: Path, outside: Path) -> None:
    _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


WAYS: tuple[Callable[[Path, Path], None], ...] = (
    *(leads_out, leads_out_to_a_secret, leads_to_a_folder_of_secrets, leads_nowhere),
    *(leads_to_itself, is_a_pipe, is_a_socket, is_a_folder, never_ends),
    *(is_said_by_the_kernel, is_sparse_and_large, cannot_be_read, is_empty, is_gone),
)

"""Files that are no regular files, too large, or links to what is somebody else's."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from tests.hostile.case import SECRET


def _lead_out(path: Path, outside: Path) -> None:
    """To what was there, with a secret in it where that can stand."""
    if path.is_dir():
        shutil.move(path, outside / "x")
    elif path.exists():
        (outside / "x").write_bytes(path.read_bytes())
        path.unlink()
    else:
        (outside / "x").write_text(SECRET)
    path.symlink_to(outside / "x")


def _grow(path: Path, outside: Path) -> None:
    if path.is_dir():
        _remove(path)
    with path.open("ab") as file:
        file.truncate(5 << 29)


def _lead_to_a_secret(path: Path, outside: Path) -> None:
    (outside / "x").write_text(f'{{"a": "{SECRET}"}}\n')
    path.symlink_to(outside / "x")


def _lead_to_a_folder_of_secrets(path: Path, outside: Path) -> None:
    (outside / "tokenizer.json").write_text(SECRET)
    path.symlink_to(outside)


def _make_socket(path: Path, outside: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's name is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def _forbid(path: Path, outside: Path) -> None:
    path.write_bytes(b"\0")
    path.chmod(0)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_KEEPING: dict[str, Callable[[Path, Path], object]] = {
    "leads out": _lead_out,
    "is sparse and large": _grow,
}
_REPLACING: dict[str, Callable[[Path, Path], object]] = {
    "leads out to a secret": _lead_to_a_secret,
    "leads to a folder of secrets": _lead_to_a_folder_of_secrets,
    "leads nowhere": lambda path, outside: path.symlink_to(outside / "nothing"),
    "leads to itself": lambda path, outside: path.symlink_to(path.name),
    "is a pipe": lambda path, outside: os.mkfifo(path),
    "is a socket": _make_socket,
    "is a folder": lambda path, outside: path.mkdir(),
    "never ends": lambda path, outside: path.symlink_to("/dev/zero"),
    "is said by the kernel": lambda path, outside: path.symlink_to("/proc/self/environ"),
    "cannot be read": _forbid,
    "is empty": lambda path, outside: path.touch(),
    "is gone": lambda path, outside: None,
}
WAYS = (*_KEEPING, *_REPLACING)


def spoil_place(way: str, path: Path, outside: Path) -> None:
    """Puts something else where a file is; `outside` is for what links lead to."""
    if way in _KEEPING:
        _KEEPING[way](path, outside)
    else:
        _remove(path)
        _REPLACING[way](path, outside)

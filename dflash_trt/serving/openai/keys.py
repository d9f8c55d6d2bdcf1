"""API keys: a file that may change while the server runs, or a variable of the environment."""

from __future__ import annotations

import hashlib
import hmac
import os
import sys
import time
from pathlib import Path

from dflash_trt.core.files import FileKind, open_file, read_text
from dflash_trt.errors import DflashError

KEYS_VARIABLE = "DFLASH_TRT_API_KEYS"
LEAST_KEY, MOST_KEYS = 16, 10_000
_LOOK_S = 1.0
_NAME_DIGITS = 8


class KeyRing:
    """The keys that are good now: hashes, so that no key lies in memory.

    Args:
        file: a key a line; empty lines and those that begin with # are none. It is read again
            when it changes; while what it says is no list of keys, the last good ones stay.
        variable: what `KEYS_VARIABLE` holds: keys with blanks or commas between.

    Raises:
        DflashError: no key, one that is too short to be a secret, or an unreadable file.
    """

    def __init__(self, file: Path | None, variable: str | None) -> None:
        self._file = file
        self._fixed = _hash_keys((variable or "").replace(",", " ").split(), KEYS_VARIABLE)
        self._seen = None if file is None else _stamp(file)
        self._read = [] if file is None else _read_keys(file)
        self._looked = time.monotonic()
        if not self._fixed and not self._read:
            raise DflashError("holds no key", where=file or KEYS_VARIABLE, usage=True)

    @staticmethod
    def open(file: Path | None) -> KeyRing | None:
        """The keys of `file` and of the environment; None where neither is given."""
        variable = os.environ.get(KEYS_VARIABLE)
        return None if file is None and variable is None else KeyRing(file, variable)

    def find(self, key: str) -> str | None:
        """The name of a good key, by which logs know it; None for any other.

        Takes as long for a wrong key as for a right one.
        """
        self._look_again()
        asked, found = _digest(key), None
        for known in (*self._fixed, *self._read):
            if hmac.compare_digest(known, asked):
                found = known
        return None if found is None else found[:_NAME_DIGITS].decode()

    def _look_again(self) -> None:
        """Reads a file that has changed, at most once a second."""
        if self._file is None or time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        try:
            stamp = _stamp(self._file)
            if stamp != self._seen:
                self._read = _read_keys(self._file)
                self._seen = stamp
        except DflashError as error:
            if self._seen is not None:  # said once for each mistake
                print(f"keys stay as they were: {error.message}", file=sys.stderr)
            self._seen = None


def _stamp(file: Path) -> tuple[int, int, int]:
    """Another one whenever the file is written or replaced."""
    with open_file(file, named=True) as opened:
        found = os.fstat(opened.fileno())
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read_keys(file: Path) -> list[bytes]:
    lines = read_text(file, FileKind.KEYS, named=True).splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return _hash_keys(keys, file)


def _hash_keys(keys: list[str], where: Path | str) -> list[bytes]:
    for number, key in enumerate(keys, start=1):
        if len(key) < LEAST_KEY or not key.isascii():
            # Not the key itself: errors end in logs.
            what = f"key {number} is not {LEAST_KEY} or more characters of ASCII"
            raise DflashError(what, where=where, fix="openssl rand -hex 24 makes one", usage=True)
    if len(keys) > MOST_KEYS:
        raise DflashError(f"more than {MOST_KEYS:,} keys", where=where, usage=True)
    return [_digest(key) for key in keys]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest().encode()

"""Options of the OpenAI front: names, keys and their limit, TLS, origins, a log of requests."""

from __future__ import annotations

import hashlib
import os
import re
import ssl
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_trt.core.files import FileKind, find_file, read_text
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError, one_line, refuse_options

KEYS_VARIABLE = "DFLASH_TRT_API_KEYS"
LEAST_KEY = 16
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")  # as browsers write them
_LOOK_S = 1.0
_NAME_DIGITS = 8


class KeyRing:
    """The keys that are good now: hashes, so that no key lies in memory.

    `file` has a key a line and is read again when it changes; while it holds none, or what is no
    key, the last good ones stay. `variable` has keys with blanks or commas between.
    """

    def __init__(self, file: Path | None, variable: str | None) -> None:
        self._file, self._looked = file, time.monotonic()
        self._fixed = _hash_keys((variable or "").replace(",", " ").split(), KEYS_VARIABLE)
        self._text = "" if file is None else read_text(file, FileKind.KEYS, named=True)
        self._read = _hash_keys(self._text.splitlines(), file or "")
        if not self._fixed and not self._read:
            raise DflashError("holds no key", where=file or KEYS_VARIABLE, usage=True)

    def find(self, key: str) -> str | None:
        """The name of a good key, by which logs know it; None for any other."""
        if self._file is not None and time.monotonic() - self._looked >= _LOOK_S:
            self._looked = time.monotonic()
            self._read_again(self._file)
        asked = _digest(key)
        return asked[:_NAME_DIGITS] if asked in self._fixed or asked in self._read else None

    def _read_again(self, file: Path) -> None:
        text = ""
        try:
            text = read_text(file, FileKind.KEYS, named=True)
            if text != self._text:
                read = _hash_keys(text.splitlines(), file)
                if not read:  # one that is being written, say; it would shut everyone out
                    raise DflashError("holds no key", where=file)
                self._read = read
        except DflashError as error:
            if text != self._text:  # said once for each mistake
                print(f"keys stay as they were: {error.message}", file=sys.stderr)
        self._text = text


def _hash_keys(lines: list[str], where: Path | str) -> frozenset[str]:
    keys = [key for key in map(str.strip, lines) if key and not key.startswith("#")]
    for number, key in enumerate(keys, start=1):
        if len(key) < LEAST_KEY or not key.isascii():
            # Not the key itself: errors end in logs.
            what = f"key {number} is not {LEAST_KEY} or more characters of ASCII"
            raise DflashError(what, where=where, fix="openssl rand -hex 24 makes one", usage=True)
    return frozenset(map(_digest, keys))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


LogFormat = Literal["none", "json"]
GenerationConfig = Literal["auto", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOptions:
    """How the front is reached, and by whom: one option of `serve` each.

    Without a file of keys and without the variable everyone may ask; `key_requests` are those of
    one key in flight. Without a certificate and key (PEM) it speaks plain HTTP. Web pages of
    `origins` may ask too. `generation_config` says whether the checkpoint's sampling is that of
    requests which state none, `page` whether there is one at `/`.
    """

    model_names: tuple[str, ...] = ()
    key_file: Path | None = None
    key_requests: int | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    origins: tuple[str, ...] = ()
    log_format: LogFormat = "none"
    generation_config: GenerationConfig = "auto"
    page: bool = True

    @property
    def scheme(self) -> str:
        return "http" if self.tls_cert is None else "https"

    def open_keys(self) -> KeyRing | None:
        """The keys; None where everyone may ask."""
        variable = os.environ.get(KEYS_VARIABLE)
        if self.key_file is not None or variable is not None:
            return KeyRing(self.key_file, variable)
        fix, limits = f"add --api-key-file, or set {KEYS_VARIABLE}", self.key_requests
        what = "is for one API key, and there are none"
        refuse_options({"--key-requests": limits}, what, fix)
        return None

    def check_origins(self) -> None:
        """Raises DflashError (usage) for an origin that no browser states."""
        for one in self.origins:
            if not _ORIGIN.fullmatch(one):
                what = f"{quoted(one)} is neither * nor like https://host or http://host:8080"
                raise DflashError(what, where="--allow-origin", usage=True)

    def check_tls(self) -> None:
        """Raises DflashError (usage) for a certificate and key that do not fit, or one alone."""
        given = {"--tls-cert": self.tls_cert, "--tls-key": self.tls_key}
        missing = [name for name, file in given.items() if file is None]
        if len(missing) == 1:
            (present,) = given.keys() - missing
            raise DflashError(f"needs {missing[0]} too", where=present, usage=True)
        if self.tls_cert is None or self.tls_key is None:
            return
        certificate = find_file(self.tls_cert, FileKind.PEM, named=True)
        key = find_file(self.tls_key, FileKind.PEM, named=True)
        try:
            # Without a password given, one that is needed would be asked for at the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
        except (OSError, ValueError) as error:
            what = f"is no certificate that fits its key ({one_line(error)})"
            raise DflashError(what, where=self.tls_cert, usage=True) from error

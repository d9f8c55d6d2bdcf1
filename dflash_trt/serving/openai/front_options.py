"""Options of the OpenAI front: names, keys and their limit, TLS, a log of requests."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_trt.core.files import FileKind, find_file
from dflash_trt.errors import DflashError, one_line, refuse_options
from dflash_trt.serving.openai.keys import KEYS_VARIABLE, KeyRing

LogFormat = Literal["none", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOptions:
    """How the front is reached, and by whom.

    Args:
        model_names: that it answers to; none: the bundle's.
        key_file: see `KeyRing`; without it and without the variable everyone may ask.
        key_requests: in flight at a time, of one key.
        tls_cert, tls_key: PEM files; without them the front speaks plain HTTP.
        log_format: of the line that is written for every request.
    """

    model_names: tuple[str, ...] = ()
    key_file: Path | None = None
    key_requests: int | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    log_format: LogFormat = "none"

    @property
    def scheme(self) -> str:
        return "http" if self.tls_cert is None else "https"

    def open_keys(self) -> KeyRing | None:
        """The keys; None where everyone may ask."""
        keys = KeyRing.open(self.key_file)
        if keys is None:
            limits = {"--key-requests": self.key_requests}
            fix = f"add --api-key-file, or set {KEYS_VARIABLE}"
            refuse_options(limits, "is for one API key, and there are none", fix)
        return keys

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

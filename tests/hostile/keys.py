"""Files of API keys, certificates and block schedules: what `serve` reads before it serves."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

from dflash_trt.errors import DflashError
from tests.hostile.case import SECRET, HostileCase
from tests.hostile.values import TEXTS, spoil

COUNT = 60
_SERVE = (
    *("serve", "bundle", "--grpc-port", "0", "--http-port", "0", "--metrics-port", "0"),
    *("--openai-port", "0"),
)
_KEY = b"0123456789abcdef0123456789abcdef"
_PEM = b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
_LOCKED = (
    b"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n"
    b"DEK-Info: AES-128-CBC,00112233445566778899AABBCCDDEEFF\n\nAAAA\n"
    b"-----END RSA PRIVATE KEY-----\n"
)


def make(random: Random, number: int) -> HostileCase:
    """Keys of any bytes, and certificates that are none; no server starts."""
    is_keys = random.random() < 0.6
    options = ("--api-key-file", "k") if is_keys else ("--tls-cert", "k", "--tls-key", "l")

    def damage(folder: Path) -> None:
        if is_keys:
            _put(random, folder / "k", _keys(random))
        else:
            pieces = (_PEM, _LOCKED, _PEM + _LOCKED, spoil(random, _PEM), b"", b"\0" * 99)
            _put(random, folder / "k", random.choice(pieces))
            _put(random, folder / "l", random.choice(pieces))

    about = "a file of API keys" if is_keys else "a certificate"
    return HostileCase(about, ("bundle",), damage, ((*_SERVE, *options),), before=_start_none)


def _start_none() -> None:
    """What comes after the files have been read is a refusal."""
    from dflash_trt.cli import serve

    def refuse(*given: object) -> None:
        raise DflashError("nothing is served here")

    serve.Supervisor = refuse  # type: ignore[assignment,misc]


def _keys(random: Random) -> bytes:
    texts = [one.encode("utf-8", "surrogatepass") for one in TEXTS]
    return random.choice(
        (
            _KEY + b"\n" + random.choice(texts),
            b"# " + _KEY,
            (_KEY + b"\n") * random.choice((2, 10_001)),
            SECRET.encode(),
            b"\n" * 100_000,
            random.randbytes(64),
            _KEY * 40_000,
            spoil(random, (_KEY + b"\n") * 5),
            b"\xef\xbb\xbf" + _KEY,
        )
    )


def _put(random: Random, path: Path, data: bytes) -> None:
    """As a file mostly, else as what is none."""
    way = random.randrange(12)
    if way == 0:
        os.mkfifo(path)
    elif way == 1:
        path.symlink_to("/dev/zero")
    elif way == 2:
        with path.open("wb") as file:
            file.truncate(5 << 29)
    elif way == 3:
        path.mkdir()
    else:
        path.write_bytes(data)

"""Makes JSON of all that `serve` writes to stderr: its own lines, libraries' and warnings."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime

_STDERR = 2
_MOST_BYTES = 1 << 16  # of a line
_LAST_S = 2.0  # for what was written last, should another process hold the pipe


def now() -> str:
    """The time, as lines of the log have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def wrap_stderr() -> None:
    """Makes JSON of every line on stderr from now on; compiled libraries do not ask Python."""
    real, (reader, writer) = os.dup(_STDERR), os.pipe()
    os.dup2(writer, _STDERR)
    os.close(writer)
    copying = threading.Thread(target=_copy, args=(reader, real), name="log", daemon=True)
    copying.start()

    def end() -> None:
        sys.stderr.flush()
        os.dup2(real, _STDERR)
        copying.join(_LAST_S)

    atexit.register(end)


def _copy(reader: int, real: int) -> None:
    with open(reader, "rb") as lines, open(real, "wb", buffering=0, closefd=False) as log:
        while line := lines.readline(_MOST_BYTES):
            with suppress(OSError):  # a log that is full ends nothing
                log.write(as_json(line) if line.strip() else b"")


def as_json(line: bytes) -> bytes:
    """The line itself where it is a JSON object, else one that holds it."""
    with suppress(ValueError, RecursionError):
        if isinstance(json.loads(line), dict):
            return line.rstrip() + b"\n"
    text = line.decode(errors="replace").rstrip()
    return json.dumps({"time": now(), "message": text}).encode() + b"\n"

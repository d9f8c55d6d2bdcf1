"""Makes JSON of all that `serve` writes: its own lines, libraries' and warnings."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from typing import TextIO

_MOST_BYTES = 1 << 16  # of a line
_LAST_S = 2.0  # for what was written last, should another process hold the pipe


def now() -> str:
    """The time, as lines of the log have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def wrap_output() -> None:
    """Makes JSON of every line of output from now on; compiled libraries do not ask Python."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        descriptor = stream.fileno()
        real, (reader, writer) = os.dup(descriptor), os.pipe()
        os.dup2(writer, descriptor)
        os.close(writer)
        copying = threading.Thread(target=_copy, args=(reader, real), name="log", daemon=True)
        copying.start()
        atexit.register(_end, stream, real, copying)


def _end(stream: TextIO, real: int, copying: threading.Thread) -> None:
    stream.flush()
    os.dup2(real, stream.fileno())
    copying.join(_LAST_S)


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

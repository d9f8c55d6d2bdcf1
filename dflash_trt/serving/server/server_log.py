"""What a Triton server prints, in a file that a flood of it does not fill."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

BURST_BYTES = 1 << 20
BYTES_PER_S = 16 << 10
_PIECE = 1 << 16
# A model outlives its server, and keeps the pipe open, until the supervisor has told the loss.
_SETTLE_S = 0.2


class ServerLog:
    """The file at `path`, appended to.

    Where it `is_bounded`, what is printed comes through this process, which leaves out what is more
    than `BURST_BYTES` and then `BYTES_PER_S`, and says how much. Triton server 2.51 writes 10 MB a
    second while it has no file left for a connection that waits.

    Attributes:
        start: where in the file this server's part begins.
        output: the file descriptor to print to, until `hand_over`.
    """

    def __init__(self, path: Path, *, is_bounded: bool) -> None:
        self._file = path.open("ab", buffering=0)
        self.start = self._file.tell()
        self.output = self._file.fileno()
        self._copier: threading.Thread | None = None
        if is_bounded:
            reading, self.output = os.pipe2(os.O_CLOEXEC)
            self._copier = threading.Thread(
                target=self._copy, args=[reading], name="server log", daemon=True
            )
            self._copier.start()

    def hand_over(self) -> None:
        """The server has its output: it ends when nobody else prints any more."""
        if self._copier is None:
            self._file.close()
        else:
            os.close(self.output)

    def settle(self) -> None:
        """Waits, not for long, until all that a server has printed that ended is in the file."""
        if self._copier is not None:
            self._copier.join(_SETTLE_S)

    def _copy(self, reading: int) -> None:
        room, since, left_out = float(BURST_BYTES), time.monotonic(), 0
        with self._file, open(reading, "rb", buffering=0) as printed:
            while piece := printed.read(_PIECE):
                now = time.monotonic()
                room, since = min(BURST_BYTES, room + (now - since) * BYTES_PER_S), now
                if len(piece) > room:
                    left_out += len(piece)
                    continue
                room -= len(piece)
                self._write(_note(left_out) + piece)
                left_out = 0
            self._write(_note(left_out))

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # a full disk: nobody stops serving for its log
            self._file.write(data)


def _note(left_out: int) -> bytes:
    if not left_out:
        return b""
    return f"\n[dflash-trt: {left_out:,} bytes that came too fast are left out]\n".encode()

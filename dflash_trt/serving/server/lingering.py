"""Keeps what Triton server may still touch after this side is done with it."""

from __future__ import annotations

import threading
import time
from collections import deque

KEEP_S = 5.0


class Lingering:
    """Holds objects of the Python backend for some seconds after their use has ended.

    Server and model share memory, and in Triton server 2.51 the model's side frees it while a
    thread of the server, or of the stub, may still be at it: docs/design/ending-a-request.md.
    What ended last is held until something else ends.
    """

    def __init__(self, keep_s: float = KEEP_S) -> None:
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._kept: deque[tuple[float, object]] = deque()

    def keep(self, ended: object) -> None:
        """Holds `ended` for a while; lets go of those whose time is over."""
        now = time.monotonic()
        with self._lock:
            self._kept.append((now, ended))
            while now - self._kept[0][0] > self._keep_s:
                self._kept.popleft()

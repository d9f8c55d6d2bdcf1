"""Notices clients that have gone, and keeps what Triton server may still touch after that."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice

from dflash_trt.serving.server.replies import Channel

# A question takes the server about 0.15 ms, and two about one request must not come close together
# (docs/serving.md).
_ROUND_S = 0.05
_QUESTIONS = 16
_KEEP_S = 5.0


class CancellationWatch:
    """Asks for every watched channel in turn, and calls back, once, for one that was cancelled.

    With n requests, each is asked about every ceil(n / 16) rounds of 50 milliseconds and more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[Channel, Callable[[], None]] = {}
        self._closing = threading.Event()
        self._asked = Lingering()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def add(self, channel: Channel, on_cancelled: Callable[[], None]) -> None:
        with self._lock:
            self._watched[channel] = on_cancelled

    def remove(self, channel: Channel) -> None:
        """No further question is asked about `channel`; one may be under way."""
        with self._lock:
            self._watched.pop(channel, None)
        self._asked.keep(channel)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_ROUND_S):
            with self._lock:
                asked = list(islice(self._watched, _QUESTIONS))
            for channel in asked:
                self._ask(channel)

    def _ask(self, channel: Channel) -> None:
        try:
            cancelled = channel.is_cancelled()
        except Exception:  # its last message has been sent meanwhile
            cancelled = False
        with self._lock:
            on_cancelled = self._watched.pop(channel, None)
            if on_cancelled is not None and not cancelled:
                self._watched[channel] = on_cancelled  # to the end of the line
        if on_cancelled is not None and cancelled:
            on_cancelled()


class Lingering:
    """Holds objects of the Python backend for some seconds after their use has ended.

    Server and model share memory, and in Triton server 2.51 the model's side frees it while a
    thread of the server, or of the stub, may still be at it: docs/serving.md.
    What ended last is held until something else ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[tuple[float, object]] = deque()

    def keep(self, ended: object) -> None:
        """Holds `ended` for a while; lets go of those whose time is over."""
        now = time.monotonic()
        with self._lock:
            self._kept.append((now, ended))
            while now - self._kept[0][0] > _KEEP_S:
                self._kept.popleft()

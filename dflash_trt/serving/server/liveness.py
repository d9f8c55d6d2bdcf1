"""Notices that a model's process has died, which nobody tells those who wait for its answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from dflash_trt.serving.server.processes import PROC, find_models

_PERIOD_S = 0.5


class LivenessWatch:
    """Looks every `period_s`, while `is_needed`, whether a process that was seen still runs.

    Triton server 2.51 refuses new requests for a model whose process has died, but those that the
    process had taken never end. To ask through the server is no way to know: the question may wait
    behind all requests in flight. `on_lost` is called at every look once the process has gone.
    """

    def __init__(
        self,
        is_alive: Callable[[], bool],
        is_needed: Callable[[], bool],
        on_lost: Callable[[], None],
        period_s: float = _PERIOD_S,
    ) -> None:
        self._is_alive = is_alive
        self._is_needed = is_needed
        self._on_lost = on_lost
        self._period_s = period_s
        self._seen = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Looks now, if the process has not been seen yet: for who is about to wait for it."""
        self._seen = self._seen or self._is_alive()

    def close(self) -> None:
        """Looks no more."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._period_s):
            if self._seen and self._is_needed() and not self._is_alive():
                self._on_lost()


def is_model_running(server_pid: int, model: str, proc: Path = PROC) -> bool:
    """Whether a child of the server runs the Python model `model`."""
    return model in find_models(server_pid, proc).values()

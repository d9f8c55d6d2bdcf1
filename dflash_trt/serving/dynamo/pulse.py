"""Ends a worker's process when its generator hangs or is broken, so that requests move on.

Dynamo's frontend notices a process that ends and sends its requests elsewhere; one that hangs keeps
them. The interpreter's own timer (`faulthandler`) ends the process with every thread's place
on stderr, whatever holds the interpreter's lock, unless it is put off again and again.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

from dflash_trt.decoding.worker import Phase
from dflash_trt.errors import EXIT_FAILED

_log = logging.getLogger(__name__)
LEAST_HANG_S, MOST_HANG_S = 10.0, 600.0
LOOK_S = 0.5


class Pulse:
    """Watches the phases of a `GeneratorWorker`; `beat` is its `on_phase`.

    A turn may take as long as its rows would one by one, `most_rows` of them, each as long as the
    shortest turn of the trial, which other processes disturb least, within 10 to 600 seconds;
    `calibrate` says when that has run. Opening may take any time.
    `on_look` is called at every look, every half second.
    """

    def __init__(self, most_rows: int, on_look: Callable[[], None]) -> None:
        self._most_rows, self._on_look = most_rows, on_look
        self._phase, self._number = Phase.OPENING, 0
        self._began_at = time.monotonic()
        self._turns_s: list[float] = []
        self._seen = -1
        self.hang_s = LEAST_HANG_S
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def beat(self, phase: Phase) -> None:
        """Notes that `phase` begins."""
        now = time.monotonic()
        if self._phase is Phase.TURN and not self._thread.is_alive():
            self._turns_s.append(now - self._began_at)
        self._phase, self._began_at = phase, now
        self._number += 1

    def calibrate(self) -> None:
        """Takes the turns until now as the measure, and begins to watch."""
        turn_s = min(self._turns_s, default=0.0)
        self.hang_s = min(max(LEAST_HANG_S, self._most_rows * turn_s), MOST_HANG_S)
        self._thread.start()

    def close(self) -> None:
        """Stops watching."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self._ending.wait(LOOK_S):
            if self._phase is Phase.BROKEN:
                _log.error("the generator is broken: this process ends, and its requests move on")
                os._exit(EXIT_FAILED)
            if self._phase is not Phase.TURN or self._number != self._seen:
                self._seen = self._number
                faulthandler.dump_traceback_later(self.hang_s, exit=True)
            try:
                self._on_look()
            except Exception:  # of figures: no reason to end
                _log.exception("a look at the generator failed")

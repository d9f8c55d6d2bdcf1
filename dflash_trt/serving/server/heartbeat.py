"""Notices a server whose processes run but do nothing any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from dflash_trt.errors import DflashError
from dflash_trt.runtime.worker import Phase
from dflash_trt.serving.server.pulse import Pulse

PING_S = 5.0


class Heartbeat:
    """Tells when nothing has been heard for `hang_s`.

    Turns of the generator are beats, as its pulse shows them: a busy server is asked nothing. While
    it is idle, `ping` asks something that passes through the rest of the server, every PING_S. A
    turn may take as long as `hang_s`: how long a chunk of a prompt takes depends on the model and
    the machine, and a hang is rarer than a long prompt.
    """

    def __init__(self, ping: Callable[[], Coroutine[Any, Any, None]], hang_s: float) -> None:
        self._ping = ping
        self._hang_s = hang_s
        self._asking: asyncio.Task[None] | None = None
        self._heard_at = time.monotonic()
        self._count = 0

    def find_trouble(self, pulse: Pulse | None, now: float) -> str | None:
        """What is wrong at the time `now`; None for a server that is heard, or was lately."""
        if pulse is None or pulse.phase is Phase.OPENING:  # a model of others; one that loads
            return None
        if pulse.phase is Phase.BROKEN:
            return "the executor failed and could not be opened again"
        self._listen(pulse, now)
        silent_s = now - self._heard_at
        if silent_s > self._hang_s:
            what = "no step has ended" if pulse.phase is Phase.TURN else "nothing was answered"
            return f"{what} for {self._hang_s:g} s"
        if self._asking is None and pulse.phase is Phase.IDLE and silent_s > PING_S:
            self._asking = asyncio.create_task(self._ping())
        return None

    def _listen(self, pulse: Pulse, now: float) -> None:
        if pulse.count != self._count:
            self._count, self._heard_at = pulse.count, max(pulse.since, self._heard_at)
        if self._asking is not None and self._asking.done():
            if self._asking.exception() is None and pulse.phase is Phase.IDLE:
                self._heard_at = now
            self._asking = None

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            with suppress(asyncio.CancelledError, DflashError):
                await self._asking

"""Connections of the OpenAI front: bounded, and none that says nothing keeps its place."""

from __future__ import annotations

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0  # for the head of a request; uvicorn's own time ends with the first byte
STALL_S = 30.0  # without taking anything of a reply
MOST_CONNECTIONS = 4096
ACCEPTED_AT_ONCE = 128
# Files of this process besides: libraries', the model's, and what asyncio has accepted but not
# shown yet, or closes but has not closed yet.
_OTHER_FILES = 3 * ACCEPTED_AT_ONCE + 128


class GuardedConnection(H11Protocol):
    """A client's connection, which a client that is slow or silent does not keep."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > count_connections():
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._await_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_timer(self.loop.call_later(STALL_S, self.drop))

    def resume_writing(self) -> None:
        self._await_head()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # an answer within an answer would be none
            self.drop()

    def drop(self) -> None:
        """Ends the connection without a word."""
        self._set_timer(None)
        self.connections.discard(self)
        self.transport.abort()

    def _await_head(self) -> None:
        def give_up() -> None:
            if self.cycle is None or self.cycle.response_complete:  # no request is answered
                self.drop()

        self._set_timer(self.loop.call_later(HEAD_S, give_up))

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


def count_connections() -> int:
    """How many connections this process may have, by its limit of open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(MOST_CONNECTIONS, files - _OTHER_FILES))

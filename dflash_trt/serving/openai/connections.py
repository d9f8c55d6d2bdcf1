"""Connections of the OpenAI front: bounded, and none that says nothing keeps its place."""

from __future__ import annotations

import asyncio
import http
import json
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_trt.serving.openai.errors import ApiError

HEAD_S = 10.0  # for the head of a request; uvicorn's own time ends with the first byte
STALL_S = 30.0  # without taking anything of a reply
MOST_CONNECTIONS = 4096
ACCEPTED_AT_ONCE = 128
# Files of this process besides: libraries', the model's, and what asyncio has accepted but not
# shown yet, or closes but has not closed yet.
_OTHER_FILES = 3 * ACCEPTED_AT_ONCE + 128
_LINGER_S = 2.0


class GuardedConnection(H11Protocol):
    """A client's connection, which a client that is slow or silent does not keep.

    Where there are too many, the oldest of those without a request goes; where all have one, the
    newcomer is told to come back.
    """

    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _refused = False
    _since = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no request of it is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) <= count_connections():
            return
        others = (one for one in self.connections if isinstance(one, GuardedConnection))
        idle = [one for one in others if one.is_idle and one is not self]
        if idle:
            min(idle, key=lambda one: one._since).drop()
        else:
            self._refuse(ApiError("too many requests are in flight", status=503))

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def on_response_complete(self) -> None:
        self._await_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused as every other mistake is."""
        if not self.is_idle:
            if self.cycle.response_started:  # an answer within an answer would be none
                self.drop()
                return
            self.cycle.disconnected = True  # whoever reads the body hears that it ends
            self.cycle.message_event.set()
        self._refuse(ApiError(msg.rstrip(".").lower()))

    def drop(self) -> None:
        """Ends the connection without a word."""
        self._forget_timers()
        self.connections.discard(self)
        self.transport.abort()

    def _await_head(self) -> None:
        self._forget_timers()
        self._since = self.loop.time()
        self._timer = self.loop.call_later(HEAD_S, self._give_up)

    def _give_up(self) -> None:
        if self.is_idle:
            self.drop()

    def _refuse(self, error: ApiError) -> None:
        """Answers with the error, and takes nothing more."""
        self._forget_timers()
        body = json.dumps(error.to_json()).encode()
        lines = [
            f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            *(f"{name}: {value}" for name, value in error.headers.items()),
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self._refused = True
        if self.transport.can_write_eof():
            # To close while there is more to read would take the answer from the client again.
            self.transport.write_eof()
            self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)
        else:
            self.transport.close()

    def _forget_timers(self) -> None:
        for timer in (self._timer, self._stalled):
            if timer is not None:
                timer.cancel()
        self._timer = self._stalled = None


def count_connections() -> int:
    """How many connections this process may have, by its limit of open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(MOST_CONNECTIONS, files - _OTHER_FILES))

"""Connections of the OpenAI front: bounded, and none that says nothing keeps its place."""

from __future__ import annotations

import asyncio
import http
import json
import logging
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_trt.serving.openai.errors import ApiError

HEAD_S = 10.0  # for the head of a request, once its first byte or the connection is there
STALL_S = 30.0  # without taking anything of a reply
MOST_CONNECTIONS = 4096
MOST_CHUNKS = 20_000  # of a body; h11 takes 20 µs for each, however small
ACCEPTED_AT_ONCE = 128
# Files of this process besides: libraries', the model's, and what asyncio has accepted but not
# shown yet, or closes but has not closed yet.
_OTHER_FILES = 3 * ACCEPTED_AT_ONCE + 128
_TELL_AGAIN_S = 60.0
_LINGER_S = 2.0
_HEAD_BYTES = 16 << 10  # as h11 has it
_logger = logging.getLogger("uvicorn.error")


class GuardedConnection(H11Protocol):
    """A client's connection, which a client that is slow or silent does not keep.

    Where there are too many, the oldest of those without a request goes; where all have one, the
    newcomer is told to come back.
    """

    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _heard = False
    _refused = False
    _since = 0.0
    _head = b""
    _lines = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request of it is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._watch_head()
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
        if self._refused:
            return
        self._heard = True
        if self.is_idle:
            self._head = (self._head + data)[:_HEAD_BYTES]
        if b"transfer-encoding" in self._head.lower():
            self._lines += data.count(b"\r\n")  # two a chunk
            if self._lines > 2 * MOST_CHUNKS:
                self._refuse(ApiError(f"the body comes in more than {MOST_CHUNKS:,} chunks"))
                return
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        self._heard, self._since = False, self.loop.time()
        self._head, self._lines = b"", 0
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
        self._refuse(ApiError(msg.rstrip(".").lower()))

    def drop(self) -> None:
        """Ends the connection without a word."""
        self._forget_timers()
        self.connections.discard(self)
        self.transport.abort()

    def _watch_head(self) -> None:
        """Lets the time run while the next request's head is awaited, and only then."""
        if not self.is_idle:
            self._forget_timers()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(HEAD_S, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        answered = self.cycle is not None  # what it still sends belongs to a request that is over
        if not self.is_idle:
            return
        if self._heard and not answered:
            self._refuse(ApiError(f"no request came within {HEAD_S:g} s", status=408))
        else:
            self.drop()

    def _refuse(self, error: ApiError) -> None:
        """Answers with the error, and takes nothing more."""
        if not self.is_idle:
            if self.cycle.response_started:  # an answer within an answer would be none
                self.drop()
                return
            self.cycle.disconnected = True  # whoever reads the body hears that it ends
            self.cycle.message_event.set()
        self._forget_timers()
        body = json.dumps(error.to_json()).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **error.headers,
        }
        lines = [f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        if self.transport.can_write_eof():
            # To close while there is more to read would take the answer from the client again.
            self._refused = True
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


class QuietAccepts:
    """An event loop's handler of exceptions that says once a minute that files have run out.

    asyncio says so, with a traceback, for every connection that it cannot accept.
    """

    def __init__(self) -> None:
        self._told_at: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") != "socket.accept() out of system resource":
            loop.default_exception_handler(context)
        elif self._told_at is None or loop.time() - self._told_at > _TELL_AGAIN_S:
            self._told_at = loop.time()
            _logger.error("connections cannot be accepted: %s", context.get("exception"))

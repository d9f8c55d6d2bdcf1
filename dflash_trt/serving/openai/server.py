"""Runs the OpenAI front on a socket of its own, inside whatever event loop is running."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from contextlib import nullcontext

import h11
import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_trt.bundle.sampling_defaults import SamplingDefaults
from dflash_trt.errors import DflashError
from dflash_trt.serving.openai.access import REQUEST_ID, Gate
from dflash_trt.serving.openai.app import OpenAiApp, Upstream
from dflash_trt.serving.openai.figures import FrontFigures
from dflash_trt.serving.openai.front_options import FrontOptions
from dflash_trt.text.tokenizer import BundleTokenizer

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


# By default the event loop may wait 5 ms, at each turn, for a thread that writes a large reply.
_SWITCH_INTERVAL_S = 0.0002
# A client that reads nothing must not keep the port.
_FLUSH_S = 2


class OpenAiServer:
    """The front of the served model `upstream`, from `run` until `stop`; closes the socket `bound`.

    The bundle's `tokenizer` has the chat template and tells the channels of answers, `defaults` are
    for requests that state nothing.
    """

    def __init__(
        self,
        name: str,
        upstream: Upstream,
        tokenizer: BundleTokenizer,
        max_seq_len: int,
        bound: socket.socket,
        options: FrontOptions = FrontOptions(),  # noqa: B008 - it is frozen
        figures: FrontFigures | None = None,
        defaults: SamplingDefaults | None = None,
    ) -> None:
        self._socket = bound
        figures = figures or FrontFigures()
        names = options.model_names or (name,)
        self._app = OpenAiApp(names, upstream, tokenizer, max_seq_len, figures, defaults)
        front: ASGIApp = Gate(self._app.starlette(page=options.page), options, figures)
        if options.origins:  # before the gate: a browser asks without a key whether it may ask
            shown, any_ = (REQUEST_ID, "Retry-After"), ("*",)
            front = CORSMiddleware(front, options.origins, any_, any_, expose_headers=shown)
        self._server = uvicorn.Server(
            uvicorn.Config(
                front,
                ssl_certfile=options.tls_cert,
                ssl_keyfile=options.tls_key,
                http=GuardedConnection,
                backlog=ACCEPTED_AT_ONCE,
                timeout_graceful_shutdown=_FLUSH_S,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
            )
        )
        # It warns of every client that speaks no HTTP, which the client is told.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        # Whoever runs the front beside a model server handles signals.
        self._server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]

    @property
    def started(self) -> bool:
        """Whether it takes connections, or has taken them."""
        return self._server.started

    async def run(self) -> None:
        """Serves until stopped; DflashError where it ends by itself."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            if self._app.renderer is not None:
                self._app.renderer.close()
        if not self._server.should_exit:
            raise DflashError("the OpenAI front ended by itself")

    def stop(self) -> None:
        """Takes no more connections; `run` returns soon, whether or not clients read on."""
        # It would say of each client that did not read its answer that the answer is incomplete.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server.should_exit = True

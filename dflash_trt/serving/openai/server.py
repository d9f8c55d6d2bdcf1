"""Runs the OpenAI front on a socket of its own, inside whatever event loop is running."""

from __future__ import annotations

import logging
import socket
from contextlib import nullcontext
from typing import TYPE_CHECKING

from dflash_trt.errors import DflashError, one_line
from dflash_trt.serving.openai.figures import FrontFigures
from dflash_trt.serving.openai.front_options import FrontOptions
from dflash_trt.text.tokenizer import BundleTokenizer

if TYPE_CHECKING:
    from dflash_trt.serving.openai.app import Upstream

# A client that reads nothing must not keep the port.
_FLUSH_S = 2


class OpenAiServer:
    """The front of the served model `upstream`, from `run` until `stop`; closes the socket `bound`.

    The bundle's `tokenizer` has the chat template and tells the channels of answers.

    Raises:
        DflashError: starlette or uvicorn is not installed.
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
    ) -> None:
        try:
            import uvicorn

            from dflash_trt.serving.openai.access import Gate
            from dflash_trt.serving.openai.app import OpenAiApp
            from dflash_trt.serving.openai.connections import ACCEPTED_AT_ONCE, GuardedConnection
        except ImportError as error:
            raise DflashError(
                f"the OpenAI front needs starlette and uvicorn ({one_line(error)})",
                fix="pip install 'dflash-trt[serve]'",
            ) from error
        self._socket = bound
        figures = figures or FrontFigures()
        names = options.model_names or (name,)
        self._app = OpenAiApp(names, upstream, tokenizer, max_seq_len, figures)
        self._server = uvicorn.Server(
            uvicorn.Config(
                Gate(self._app.starlette(), options, figures),
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
        """Serves until stopped.

        Raises:
            DflashError: it ended by itself.
        """
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

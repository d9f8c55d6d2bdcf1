"""Runs the OpenAI front on a socket of its own, inside whatever event loop is running."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import nullcontext
from typing import TYPE_CHECKING

from dflash_trt.errors import DflashError, one_line
from dflash_trt.serving.openai.figures import FrontFigures
from dflash_trt.serving.openai.front_options import FrontOptions
from dflash_trt.text.thoughts import find_format
from dflash_trt.text.tokenizer import BundleTokenizer

if TYPE_CHECKING:
    from dflash_trt.serving.openai.app import Upstream

# For the last words to go out.
_CUT_S = 0.7


class OpenAiServer:
    """The front of the served model `upstream`, from `run` until `stop`; closes the socket `bound`.

    The bundle's `tokenizer` has the chat template and tells the channels of answers. After `stop`
    replies in flight go on to their end, or until `cut`.

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
        self._renderer = tokenizer.open_renderer()
        app = OpenAiApp(
            options.model_names or (name,),
            upstream,
            self._renderer,
            tokenizer,
            max_seq_len,
            find_format(tokenizer.core),
            figures,
        )
        self._requests = Gate(app.starlette(), options, figures)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._requests,
                ssl_certfile=options.tls_cert,
                ssl_keyfile=options.tls_key,
                http=GuardedConnection,
                backlog=ACCEPTED_AT_ONCE,
                lifespan="off",
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
            if self._renderer is not None:
                self._renderer.close()
        if not self._server.should_exit:
            raise DflashError("the OpenAI front ended by itself")

    def stop(self) -> None:
        """Takes no more connections and lets `run` return when those there are have ended."""
        self._server.should_exit = True

    async def cut(self) -> None:
        """Ends what is in flight and lets `run` return at once."""
        self.stop()
        # It would say of each client that did not read its answer that the answer is incomplete.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._requests.cut()
        await asyncio.sleep(_CUT_S)
        self._server.force_exit = True

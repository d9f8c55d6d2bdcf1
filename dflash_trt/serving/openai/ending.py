"""Lets a front be shut down while requests are in flight: each of them ends as an API's does."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_trt.serving.openai.errors import ApiError

_LAST_WORDS_S = 0.5


class Cuttable:
    """The application `app`, whose requests can all be ended at once.

    A server that cancels requests answers them with a plain-text 500 and prints tracebacks.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cut = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def note(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._app(scope, receive, note)
        except asyncio.CancelledError:
            if not self._is_cut:
                raise
            task.uncancel()
            error = ApiError("the server is shutting down", status=503, code="unavailable")
            with suppress(TimeoutError):  # a client that reads nothing
                async with asyncio.timeout(_LAST_WORDS_S):
                    if not started:
                        await JSONResponse(error.to_json(), 503)(scope, receive, send)
        finally:
            self._tasks.discard(task)

    def cut(self) -> None:
        """Ends every request: with a 503 where no answer has begun."""
        self._is_cut = True
        for task in self._tasks:
            task.cancel()

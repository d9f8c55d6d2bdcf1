"""The streams of a request's outputs: merged, awaited while the client stays, sent as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dflash_trt.decoding import RequestResult
from dflash_trt.errors import DflashError
from dflash_trt.serving.client.client import TextDelta
from dflash_trt.serving.openai.reply import ReplyWriter

_MOST_WAITING = 16
"""Deltas that a slow client lets wait here; the others wait in the served model."""

T = TypeVar("T")
Deltas = AsyncGenerator[TextDelta, None]
ChoiceDeltas = AsyncGenerator[tuple[int, TextDelta], None]


async def merge(streams: Sequence[Deltas]) -> ChoiceDeltas:
    """Yields the deltas of all, each with its stream's index, as they come.

    The first error of one ends all of them.
    """
    waiting: asyncio.Queue[tuple[int, TextDelta] | Exception | None] = asyncio.Queue(_MOST_WAITING)

    async def read(index: int, stream: Deltas) -> None:
        ending: Exception | None = None
        try:
            async with aclosing(stream):
                async for delta in stream:
                    await waiting.put((index, delta))
        except Exception as error:
            ending = error
        await waiting.put(ending)

    reading = [asyncio.create_task(read(index, one)) for index, one in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            item = await waiting.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


class EventStream(StreamingResponse):
    """A stream of server-sent events; the request ends with it, however it ends."""

    media_type = "text/event-stream"

    def __init__(
        self, first: tuple[int, TextDelta], deltas: ChoiceDeltas, writer: ReplyWriter
    ) -> None:
        events = _write_events(first, deltas, writer)
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._deltas, self._events = deltas, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._deltas), aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _write_events(
    first: tuple[int, TextDelta], deltas: ChoiceDeltas, writer: ReplyWriter
) -> AsyncGenerator[bytes, None]:
    """The reply's events; an error after the first of them is an event too."""
    yield writer.opening() + writer.piece(*first)
    try:
        async for index, delta in deltas:
            yield writer.piece(index, delta)
    except DflashError as error:
        yield writer.fail(error)


async def finish(deltas: ChoiceDeltas, count: int) -> list[RequestResult]:
    """The results of all outputs, in order."""
    results: dict[int, RequestResult] = {}
    async with aclosing(deltas):
        async for index, delta in deltas:
            if delta.result is not None:
                results[index] = delta.result
    return [results[index] for index in range(count)]  # whole, or the stream had raised


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled when the client hangs up."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _wait_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

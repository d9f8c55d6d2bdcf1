"""The streams of a request's outputs: merged, awaited while the client stays, sent as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dflash_trt.errors import DflashError
from dflash_trt.serving.client.client import TextDelta
from dflash_trt.serving.openai.large import ReplyDesk, Written, check_size, is_large
from dflash_trt.serving.openai.reply import ReplyWriter

_MOST_WAITING = 16
"""Deltas that a slow client lets wait here; the others wait in the served model."""
HEAD_S = 1.0
"""What has no answer by then is not refused: a stream's head goes out."""
COMMENT_S = 5.0
_COMMENT = b": waiting\n\n"

T = TypeVar("T")
Deltas = AsyncGenerator[TextDelta, None]
ChoiceDelta = tuple[int, TextDelta] | None  # None: there was none for a while
ChoiceDeltas = AsyncGenerator[ChoiceDelta, None]


async def merge(streams: Sequence[Deltas]) -> ChoiceDeltas:
    """Yields the deltas of all, each with its stream's index, as they come.

    None comes after HEAD_S without any, and after every COMMENT_S without one. The first error of
    one ends all of them.
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
        left, patience = len(streams), HEAD_S
        while left:
            try:
                async with asyncio.timeout(patience):
                    item = await waiting.get()
            except TimeoutError:
                yield None
                continue
            finally:
                patience = COMMENT_S
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
        self, first: ChoiceDelta, deltas: ChoiceDeltas, writer: ReplyWriter, desk: ReplyDesk
    ) -> None:
        events = _write_events(first, deltas, writer, desk)
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._deltas, self._events = deltas, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._deltas), aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _write_events(
    item: ChoiceDelta, deltas: ChoiceDeltas, writer: ReplyWriter, desk: ReplyDesk
) -> AsyncGenerator[bytes, None]:
    """The reply's events, `item` first; an error after the first of them is an event too."""
    yield writer.opening()
    try:
        while True:
            if item is None:
                yield _COMMENT
            else:
                parts = partial(writer.piece, *item)
                async for piece in await desk.write(parts, large=is_large(item[1])):
                    yield piece
            item = await anext(deltas)
    except StopAsyncIteration:
        pass
    except DflashError as error:
        yield writer.fail(error)


async def write_whole(
    deltas: ChoiceDeltas, count: int, writer: ReplyWriter, desk: ReplyDesk
) -> Response:
    """The reply to a request that does not stream; each output is written as it ends."""
    choices: dict[int, Written] = {}
    any_large = False
    async with aclosing(deltas):
        async for item in deltas:
            if item is None or (result := item[1].result) is None:
                continue
            any_large |= (large := is_large(item[1]))
            parts = partial(writer.choice, item[0], result)
            choices[item[0]] = await desk.write(parts, large=large)
            check_size(sum(one.size for one in choices.values()))
    listed = [choices[index] for index in range(count)]  # whole, or the stream had raised
    parts = partial(writer.whole, listed)
    whole = await desk.write(parts, large=any_large, within=listed)
    length = {"Content-Length": str(whole.size)}
    return StreamingResponse(whole, headers=length, media_type="application/json")


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

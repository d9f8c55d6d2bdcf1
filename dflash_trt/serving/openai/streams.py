"""The streams of a request's outputs: merged, awaited while the client stays, sent as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dflash_trt.errors import DflashError
from dflash_trt.serving.client.client import TextDelta
from dflash_trt.serving.openai.large import PIECE_BYTES, ReplyDesk, is_large
from dflash_trt.serving.openai.reply import ReplyWriter, error_event

_MOST_WAITING = 16
"""Deltas that a slow client lets wait here; the others wait in the served model."""
HEAD_S = 1.0
"""What has no answer by then is not refused: a stream's head goes out."""
COMMENT_S = 5.0
_COMMENT = b": waiting\n\n"


class _Sign(Enum):
    """What goes between deltas: a stream's end, and that there was none for a while."""

    END = auto()
    WAIT = auto()


T = TypeVar("T")
Deltas = AsyncGenerator[TextDelta, None]
ChoiceDeltas = AsyncGenerator[tuple[int, TextDelta] | None, None]


async def merge(streams: Sequence[Deltas], *, waits: bool = False) -> ChoiceDeltas:
    """Yields the deltas of all, each with its stream's index, as they come.

    With `waits`, None after HEAD_S without one, and after every COMMENT_S more. The first error of
    one ends all of them.
    """
    waiting: asyncio.Queue[tuple[int, TextDelta] | Exception | _Sign] = asyncio.Queue(_MOST_WAITING)
    taken = 0

    async def read(index: int, stream: Deltas) -> None:
        ending: Exception | _Sign = _Sign.END
        try:
            async with aclosing(stream):
                async for delta in stream:
                    await waiting.put((index, delta))
        except Exception as error:
            ending = error
        await waiting.put(ending)

    async def tick() -> None:
        pause = HEAD_S
        while True:
            before = taken
            await asyncio.sleep(pause)
            if taken == before and waiting.empty():
                waiting.put_nowait(_Sign.WAIT)
            pause = COMMENT_S

    reading = [asyncio.create_task(read(index, one)) for index, one in enumerate(streams)]
    if waits:
        reading.append(asyncio.create_task(tick()))
    try:
        left = len(streams)
        while left:
            item = await waiting.get()
            taken += 1
            if isinstance(item, Exception):
                raise item
            if item is _Sign.END:
                left -= 1
            else:
                yield None if isinstance(item, _Sign) else item
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


class EventStream(StreamingResponse):
    """A stream of server-sent events; the request ends with it, however it ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: tuple[int, TextDelta] | None,
        deltas: ChoiceDeltas,
        writer: ReplyWriter,
        desk: ReplyDesk,
    ) -> None:
        events = _write_events(first, deltas, writer, desk)
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._deltas, self._events = deltas, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._deltas), aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _write_events(
    first: tuple[int, TextDelta] | None,
    deltas: ChoiceDeltas,
    writer: ReplyWriter,
    desk: ReplyDesk,
) -> AsyncGenerator[bytes, None]:
    """The reply's events; an error after the first of them is an event too."""
    opening, item = writer.opening(), first
    try:
        while True:
            if item is None:
                yield _COMMENT
            else:
                large = is_large(item[1])
                piece = opening + await desk.write(partial(writer.piece, *item), large=large)
                opening = b""
                for start in range(0, max(len(piece), 1), PIECE_BYTES):
                    yield piece[start : start + PIECE_BYTES]
                    if large:
                        await asyncio.sleep(0)  # others' turn, even where nothing waits
            item = await anext(deltas)
    except StopAsyncIteration:
        return
    except DflashError as error:
        yield error_event(error)


async def write_whole(
    deltas: ChoiceDeltas, count: int, writer: ReplyWriter, desk: ReplyDesk
) -> Response:
    """The reply to a request that does not stream; each output is written as it ends."""
    choices: dict[int, Any] = {}
    places: Any = None
    held = desk.open()
    try:
        async with aclosing(deltas):
            async for item in deltas:
                if item is None or item[1].result is None:
                    continue
                index, delta = item
                large, result = is_large(delta), item[1].result
                choices[index] = await held.write(
                    partial(writer.choice, index, result), large=large
                )
                if index == 0:
                    places = await held.write(partial(writer.places, result), large=large)
        # Whole, or the stream had raised.
        return held.respond(writer.whole([choices[index] for index in range(count)], places))
    except BaseException:
        held.close()
        raise


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

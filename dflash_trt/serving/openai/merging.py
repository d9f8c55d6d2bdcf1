"""The streams of one request's outputs as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from dflash_trt.serving.client.client import TextDelta

_MOST_WAITING = 16
"""Deltas that a slow client lets wait here; the others wait in the served model."""

Deltas = AsyncGenerator[TextDelta, None]


async def merge(streams: Sequence[Deltas]) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yields the deltas of all, each with its stream's index, as they come.

    The first error of one ends all of them.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield 0, delta
        return
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

"""Bodies of requests: bounded in bytes, values and time; large ones are read beside the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from dflash_trt.core.strict_json import parse_json
from dflash_trt.serving.openai.errors import ApiError

MAX_BODY_BYTES = 16 << 20
MAX_HELD_BYTES = 64 << 20
"""Of all bodies that are in memory at a time."""
MAX_VALUES = 100_000
PAUSE_S = 10.0
"""What a body may take, besides a second for every `LEAST_RATE` bytes that have come."""
LEAST_RATE = 32 << 10
_SMALL_BYTES = 16 << 10  # read in the event loop, in milliseconds whatever they hold

T = TypeVar("T")


class BodyReader:
    """Reads the bodies of all requests of a front."""

    def __init__(self) -> None:
        self._held = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="request-body")

    async def read(self, request: Request, understand: Callable[[Any], T]) -> T:
        """What `understand` makes of the body's JSON value.

        Raises:
            ApiError: a body too large, too slow, or one too many (413, 408, 503), or not JSON.
            ClientDisconnect: the client has gone.
        """
        body = bytearray()
        if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
            raise _too_large()

        def parse() -> T:
            return understand(parse_json(bytes(body), "body", MAX_VALUES))

        try:
            async for chunk in _receive(request):
                if len(body) + len(chunk) > MAX_BODY_BYTES:
                    raise _too_large()
                if self._held + len(chunk) > MAX_HELD_BYTES:
                    raise ApiError("too many large requests are being read", status=503)
                self._held += len(chunk)
                body += chunk
            if len(body) <= _SMALL_BYTES:
                return parse()
            return await asyncio.get_running_loop().run_in_executor(self._thread, parse)
        finally:
            self._held -= len(body)


def _too_large() -> ApiError:
    return ApiError(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413)


async def _receive(request: Request) -> AsyncIterator[bytes]:
    """The body, piece by piece, while it comes fast enough."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PAUSE_S
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise ApiError("the body came too slowly", status=408) from None
        if chunk is None:
            return
        deadline += len(chunk) / LEAST_RATE
        yield chunk

"""Large replies: written beside the event loop, in pieces, and bounded in bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from json import JSONEncoder
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dflash_trt.decoding import TokenLogprob
from dflash_trt.serving.client.client import GenerationRequest, TextDelta
from dflash_trt.serving.openai.errors import ApiError

MAX_REPLY_BYTES = 128 << 20
MAX_HELD_BYTES = 256 << 20
"""Of all large replies that are in memory at a time."""
PIECE_BYTES = 64 << 10
_SMALL_VALUES = 1000  # written in the event loop, in a millisecond or two
_AT_ONCE = 64  # elements of a long list, for which the encoder holds Python's lock
_LEAST_PLACE = len('"0":{"logprob":0.0,"rank":1,"decoded_token":""},')

WHOLE = JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
# ASCII: some readers of event streams take U+2028 for the end of a line.
EVENT = JSONEncoder(separators=(",", ":"))

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Written:
    """A value whose JSON there is already, piece by piece."""

    pieces: Sequence[bytes]

    def __len__(self) -> int:
        return sum(map(len, self.pieces))


def write_pieces(value: Any, encoder: JSONEncoder) -> Iterator[bytes]:
    """Yields JSON in pieces of some size; other threads go on between parts of a piece.

    Lists of many elements must have small ones.
    """
    parts: list[bytes] = []
    size = 0
    for part in _walk(value, encoder):
        if size + len(part) > PIECE_BYTES and parts:
            yield b"".join(parts)
            parts, size = [], 0
        parts.append(part)
        size += len(part)
    yield b"".join(parts)


def _walk(value: Any, encoder: JSONEncoder) -> Iterator[bytes]:
    if isinstance(value, Written):
        yield from value.pieces
    elif isinstance(value, dict) and value:
        mark = "{"
        for name, one in value.items():
            yield f"{mark}{encoder.encode(name)}:".encode()
            yield from _walk(one, encoder)
            mark = ","
        yield b"}"
    elif isinstance(value, list) and len(value) > _AT_ONCE:
        for start in range(0, len(value), _AT_ONCE):
            part = encoder.encode(value[start : start + _AT_ONCE])
            yield f"{',' if start else '['}{part[1:-1]}".encode()
        yield b"]"
    elif isinstance(value, list) and value:
        mark = "["
        for one in value:
            yield mark.encode()
            yield from _walk(one, encoder)
            mark = ","
        yield b"]"
    else:
        yield encoder.encode(value).encode()


def is_large(delta: TextDelta) -> bool:
    """Whether what a delta says, or the result that it ends with, takes long to write."""
    result = delta.result
    lists = [delta.logprobs, delta.prompt_logprobs]
    lists += [] if result is None else [result.logprobs, result.prompt_logprobs]
    text = delta.text if result is None else result.text or delta.text
    return len(text) // 16 + sum(map(_count_values, lists)) > _SMALL_VALUES


def _count_values(logprobs: Sequence[TokenLogprob] | None) -> int:
    return len(logprobs) * (2 + len(logprobs[-1].top_ids)) if logprobs else 0


def check_size(outputs: Sequence[GenerationRequest]) -> None:
    """Raises ApiError where the prompts' log-probabilities alone must make a reply too large.

    How many tokens a text has is not known yet: its reply is measured as it is written.
    """
    least = sum(
        (len(one.prompt) - 1) * max(one.prompt_logprobs, 1) * _LEAST_PLACE
        for one in outputs
        if one.prompt_logprobs is not None and not isinstance(one.prompt, str)
    )
    if least > MAX_REPLY_BYTES and not outputs[0].streaming:
        raise _too_large(f"of at least {least >> 20:,} MiB")


def _too_large(size: str = "") -> ApiError:
    most = MAX_REPLY_BYTES >> 20
    what = f"an answer {size} is more than {most} MiB" if size else f"it is more than {most} MiB"
    return ApiError(f"{what}; ask for less at a time, or stream", param="logprobs")


class ReplyDesk:
    """Where a front's replies are written: small ones at once, parts of large ones in turn."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reply")
        self._held = 0

    async def write(self, work: Callable[[], T], *, large: bool) -> T:
        """What `work` returns, which runs beside the event loop where it is `large`."""
        if not large:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def open(self) -> HeldReply:
        """An empty reply."""
        return HeldReply(self)

    def take(self, count: int) -> None:
        """Counts bytes that are held from now on, or fewer; ApiError where there is no room."""
        if self._held + count > MAX_HELD_BYTES:
            raise ApiError("too many large answers are being written", status=503)
        self._held += count


class HeldReply:
    """The parts of a reply that is being written, counted until it is sent."""

    def __init__(self, desk: ReplyDesk) -> None:
        self._desk, self._size = desk, 0

    async def write(self, work: Callable[[], Any], *, large: bool) -> Any:
        """The JSON value that `work` returns; of a large one what is written already.

        Raises:
            ApiError: the reply, or all of them, are too large.
        """
        if not large:
            return work()
        made = await self._desk.write(lambda: Written([*write_pieces(work(), WHOLE)]), large=True)
        self._desk.take(len(made))
        self._size += len(made)
        if self._size > MAX_REPLY_BYTES:
            raise _too_large()
        return made

    def respond(self, value: Any) -> StreamingResponse:
        """The response that has `value` for its body."""
        return _PiecedResponse([*write_pieces(value, WHOLE)], self)

    def close(self) -> None:
        """Lets its bytes go."""
        self._desk.take(-self._size)
        self._size = 0


class _PiecedResponse(StreamingResponse):
    """JSON that is sent as fast as the client takes it, with others' turns between its pieces."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes], held: HeldReply) -> None:
        length = sum(map(len, pieces))
        super().__init__(hand_out(pieces), headers={"Content-Length": str(length)})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._held.close()


async def hand_out(pieces: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
    """Yields pieces; the event loop goes on between them, even where nothing waits."""
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)

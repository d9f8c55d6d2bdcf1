"""Large replies: written beside the event loop, in pieces, and bounded in bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from json import JSONEncoder
from typing import Any
from weakref import WeakSet

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
Parts = Callable[[], Iterable[bytes]]


class Written:
    """Text that is written already, in pieces of some size."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        for piece in _join(parts):
            self.pieces.append(piece)
            self.size += len(piece)
            check_size(self.size)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece
            if len(self.pieces) > 1:  # others' turn, even where nothing waits
                await asyncio.sleep(0)


def _join(parts: Iterable[bytes]) -> Iterator[bytes]:
    joined: list[bytes] = []
    size = 0
    for part in parts:
        if size + len(part) > PIECE_BYTES and joined:
            yield b"".join(joined)
            joined, size = [], 0
        joined.append(part)
        size += len(part)
    yield b"".join(joined)


def write_json(value: Any, encoder: JSONEncoder) -> Iterator[bytes]:
    """Yields parts of the JSON of a value; other threads go on between them.

    What is `Written` stands for itself. The elements of long lists must be small.
    """
    if isinstance(value, Written):
        yield from value.pieces
    elif isinstance(value, dict):
        yield b"{"
        for place, (name, one) in enumerate(value.items()):
            yield f"{',' if place else ''}{encoder.encode(name)}:".encode()
            yield from write_json(one, encoder)
        yield b"}"
    elif isinstance(value, list):
        step = _AT_ONCE if len(value) > _AT_ONCE else 1
        yield b"["
        for start in range(0, len(value), step):
            yield b"," if start else b""
            if step == 1:
                yield from write_json(value[start], encoder)
            else:
                yield encoder.encode(value[start : start + step])[1:-1].encode()
        yield b"]"
    else:
        yield encoder.encode(value).encode()


def is_large(delta: TextDelta) -> bool:
    """Whether what a delta says, or the result that it ends with, takes long to write."""
    said = delta.result or delta
    values = sum(map(_count_values, (said.logprobs, said.prompt_logprobs)))
    return len(said.text or "") // 16 + values > _SMALL_VALUES


def _count_values(logprobs: Sequence[TokenLogprob] | None) -> int:
    return len(logprobs) * (2 + len(logprobs[-1].top_ids)) if logprobs else 0


def check_size(size: int) -> None:
    """Raises ApiError where a reply of so many bytes is too large."""
    if size > MAX_REPLY_BYTES:
        what = f"the answer is larger than {MAX_REPLY_BYTES >> 20} MiB; ask for less at a time"
        raise ApiError(what, param="logprobs")


def check_places(outputs: Sequence[GenerationRequest], top: int | None) -> None:
    """Raises ApiError where `top` log-probabilities a token of the prompts must be too many.

    How many tokens a text has is not known yet: its reply is measured as it is written.
    """
    places = sum(len(one.prompt) - 1 for one in outputs if not isinstance(one.prompt, str))
    if not outputs[0].streaming:
        check_size(places * (top or 0) * _LEAST_PLACE)


class ReplyDesk:
    """Where a front's replies are written: small ones at once, large ones beside the event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reply")
        self._held: WeakSet[Written] = WeakSet()

    async def write(self, parts: Parts, *, large: bool, within: Iterable[Written] = ()) -> Written:
        """What `parts` yields, which may have others `within`; ApiError where it is too much."""
        if not large:
            return Written(parts())
        loop = asyncio.get_running_loop()
        made = await loop.run_in_executor(self._thread, lambda: Written(parts()))
        self._held.difference_update(within)
        if sum(one.size for one in self._held) + made.size > MAX_HELD_BYTES:
            raise ApiError("too many large answers are being written", status=503)
        self._held.add(made)
        return made

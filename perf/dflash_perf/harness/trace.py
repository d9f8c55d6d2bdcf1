"""Collects what arrives for one request, and counts its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from dflash_perf.harness.records import RequestRecord, ServerCounts, TokenSource

Streaming = Literal["cumulative", "delta"]

_SETTLED = 4
_ID_BYTES = 4


class GrownBytes:
    """Joins streamed pieces, each only the new part ("delta") or all so far ("cumulative").

    A cumulative piece begins with the one before. After _SETTLED such pieces that grew, the stream
    counts as cumulative and earlier pieces are dropped. With fewer, `whole` decides.

    Args:
        streaming: which it is, if the server says so.
    """

    def __init__(self, streaming: Streaming | None = None) -> None:
        self._streaming = streaming
        self._last = b""
        self._joined: list[bytes] = []
        self._growths = 0

    def push(self, piece: bytes) -> None:
        if self._streaming is None:
            if not piece.startswith(self._last):
                self._streaming = "delta"
            elif len(piece) > len(self._last):
                self._growths += 1
                if self._growths == _SETTLED:
                    self._streaming = "cumulative"
        if self._streaming != "cumulative":
            self._joined.append(piece)
        elif self._joined:
            self._joined.clear()
        self._last = piece

    def whole(self, length: int | None = None) -> bytes:
        """The whole output; `length` in bytes, if known, decides where the pieces fit both ways."""
        joined = b"".join(self._joined)
        if self._streaming == "cumulative":
            return self._last
        if self._streaming == "delta" or len(joined) == length:
            return joined
        # Pieces that all equal the first are more likely equal tokens than one cumulative output.
        return self._last if self._growths > 1 or len(self._last) == length else joined


@dataclass(slots=True)
class Trace:
    """One request in flight; endpoints fill it as messages arrive. Times are of `perf_counter`.

    Args:
        index: its number in the run.
        prompt: index of its prompt.
        due_at: open loop: when it is to be sent.
        set_name: the named set of the prompt.
        ids: int32 token ids as bytes.
    """

    index: int
    prompt: int
    due_at: float | None = None
    set_name: str | None = None
    sent_at: float = 0.0
    first_text_at: float | None = None
    last_at: float | None = None
    messages: int = 0
    ids: GrownBytes | None = None
    text: GrownBytes = field(default_factory=GrownBytes)
    counts: ServerCounts = field(default_factory=ServerCounts)
    finish_reason: str | None = None
    error: str | None = None

    def start(self) -> None:
        """Notes that the request is sent now."""
        self.sent_at = time.perf_counter()

    def receive(
        self, at: float, text: bytes, ids: bytes | None, *, streaming: Streaming | None
    ) -> None:
        """Adds a message with output that came at `at`."""
        self.messages += 1
        self.last_at = at
        if text:
            if self.first_text_at is None:
                self.first_text_at = at
            self.text.push(text)
        if ids is not None:
            if self.ids is None:
                self.ids = GrownBytes(streaming)
            self.ids.push(ids)

    def to_record(
        self, started_at: float, count_tokens: Callable[[str], int] | None
    ) -> RequestRecord:
        """The record, with times since `started_at`; `count_tokens` is the client's tokenizer."""
        record = RequestRecord(
            index=self.index,
            prompt=self.prompt,
            set_name=self.set_name,
            sent_s=self.sent_at - started_at,
            delay_s=None if self.due_at is None else self.sent_at - self.due_at,
            messages=self.messages,
            error=self.error,
        )
        if self.error is not None:
            return record
        tokens, source, differs = self._count(count_tokens)
        return replace(
            record,
            ttft_s=self._since_sent(self.first_text_at),
            e2e_s=self._since_sent(self.last_at),
            token_source=source,
            count_differs=differs,
            finish_reason=self.finish_reason,
            **{**asdict(self.counts), "output_tokens": tokens},
        )

    def output_ids(self) -> bytes | None:
        """The answer's token ids, int32; None where the server told none."""
        if self.ids is None:
            return None
        told = self.counts.output_tokens
        return self.ids.whole(None if told is None else told * _ID_BYTES)

    def _count(
        self, count_tokens: Callable[[str], int] | None
    ) -> tuple[int | None, TokenSource | None, bool]:
        """The tokens, how they were counted, and whether the server's own count differs."""
        told = self.counts.output_tokens
        if (ids := self.output_ids()) is not None:
            tokens = len(ids) // _ID_BYTES
            return tokens, "output_ids", told is not None and told != tokens
        if told is not None:
            return told, "counts", False
        if count_tokens is not None:
            return count_tokens(self.text.whole().decode(errors="replace")), "tokenizer", False
        return None, None, False

    def _since_sent(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.sent_at

"""Measured requests: what arrives for one, its record (a line of requests.jsonl), and a run's."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from pydantic import TypeAdapter

from dflash_perf.harness.sweep_config import Goodput
from dflash_trt.serving.client.draft_counts import DraftCounts

TokenSource = Literal["output_ids", "counts", "tokenizer"]
Streaming = Literal["cumulative", "delta"]
_SETTLED = 4
_ID_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounts:
    """A server's counts of a finished request; None where it does not report one.

    Args:
        histogram: item i counts the verify steps that emitted i + 1 tokens.
        position_trials: item j counts the steps in which draft j + 1 of the block was checked.
        position_accepts: item j counts the steps in which it was accepted.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    verify_steps: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    histogram: tuple[int, ...] | None = None
    position_trials: tuple[int, ...] | None = None
    position_accepts: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord(ServerCounts):
    """A finished or failed request; a figure that was not measured is None, never 0.

    Args:
        index: its number in the run, in the order of sending.
        prompt: index of its prompt.
        set_name: the named set that has it; None where sets have no names.
        sent_s: when it was sent, since the run began.
        ttft_s: sent → first text.
        e2e_s: sent → final response.
        output_tokens: counted by `token_source`, never by messages.
        looping: whether the answer repeats itself (`decoding.loops`); None without token ids.
        error: why it failed; other fields may then be missing.
    """

    index: int
    prompt: int
    set_name: str | None = None
    sent_s: float
    ttft_s: float | None = None
    e2e_s: float | None = None
    token_source: TokenSource | None = None
    looping: bool | None = None
    finish_reason: str | None = None
    error: str | None = None

    @property
    def completed(self) -> bool:
        return self.error is None

    @property
    def is_short(self) -> bool:
        """Whether the answer was empty or ended after a token, and not by the length asked for."""
        tokens = self.output_tokens
        nothing = self.ttft_s is None if tokens is None else tokens < 2
        return nothing and self.finish_reason != "length"

    def to_json(self) -> dict[str, Any]:
        """The fields that are not at their defaults; times to the microsecond."""
        shown: dict[str, Any] = {}
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                shown[one.name] = round(value, 6) if isinstance(value, float) else value
        return shown

    @staticmethod
    def from_json(raw: dict[str, Any]) -> RequestRecord:
        """The record that `to_json` wrote; raises ValueError for anything else."""
        return _RECORDS.validate_python(raw)


_RECORDS = TypeAdapter(RequestRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run: one configuration under one load.

    Args:
        window_s: first measured request sent → last final response.
        client_cpu_share: processor time of this process / wall time of the run; 1 is one core.
        gpus: throughput is divided by their number; None is throughput of the whole server.
        goodput: the limits of a good request.
        drafts: the server's own counters meanwhile, for servers whose answers tell nothing.
    """

    requests: tuple[RequestRecord, ...]
    window_s: float
    client_cpu_share: float
    gpus: int | None = None
    goodput: Goodput = Goodput()
    drafts: DraftCounts | None = None

    @property
    def completed(self) -> list[RequestRecord]:
        return [request for request in self.requests if request.completed]


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
        if self._streaming == "cumulative":
            self._joined.clear()
        else:
            self._joined.append(piece)
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
        set_name: the named set of the prompt.
        ids: int32 token ids as bytes.
        told: what the ends of a stream say, by their names.
    """

    index: int
    prompt: int
    set_name: str | None = None
    sent_at: float = 0.0
    first_text_at: float | None = None
    last_at: float | None = None
    ids: GrownBytes | None = None
    text: GrownBytes = field(default_factory=GrownBytes)
    counts: ServerCounts = field(default_factory=ServerCounts)
    told: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    error: str | None = None

    def start(self) -> None:
        """Notes that the request is sent now."""
        self.sent_at = time.perf_counter()

    def receive(
        self, at: float, text: bytes, ids: bytes | None, *, streaming: Streaming | None
    ) -> None:
        """Adds a message with output that came at `at`."""
        self.last_at = at
        if text:
            if self.first_text_at is None:
                self.first_text_at = at
            self.text.push(text)
        if ids is not None:
            self.ids = self.ids or GrownBytes(streaming)
            self.ids.push(ids)

    def to_record(
        self, started_at: float, count_tokens: Callable[[str], int] | None
    ) -> RequestRecord:
        """The record, with times since `started_at`; `count_tokens` is the client's tokenizer."""
        known: dict[str, Any] = {}
        if self.error is None:
            tokens, source = self._count(count_tokens)
            known = {
                "ttft_s": self._since_sent(self.first_text_at),
                "e2e_s": self._since_sent(self.last_at),
                "token_source": source,
                "finish_reason": self.finish_reason,
                **asdict(self.counts),
                "output_tokens": tokens,
            }
        return RequestRecord(
            index=self.index,
            prompt=self.prompt,
            set_name=self.set_name,
            sent_s=self.sent_at - started_at,
            error=self.error,
            **known,
        )

    def output_ids(self) -> bytes | None:
        """The answer's token ids, int32; None where the server told none."""
        told = self.counts.output_tokens
        length = None if told is None else told * _ID_BYTES
        return None if self.ids is None else self.ids.whole(length)

    def _count(
        self, count_tokens: Callable[[str], int] | None
    ) -> tuple[int | None, TokenSource | None]:
        """The tokens, and how they were counted."""
        if (ids := self.output_ids()) is not None:
            return len(ids) // _ID_BYTES, "output_ids"
        if self.counts.output_tokens is not None:
            return self.counts.output_tokens, "counts"
        if count_tokens is not None:
            return count_tokens(self.text.whole().decode(errors="replace")), "tokenizer"
        return None, None

    def _since_sent(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.sent_at


class Endpoint(Protocol):
    """A served model; use it only in the event loop that created it."""

    async def describe(self) -> dict[str, Any]:
        """Checks that the server can run the sweep; returns its server, model and parameters.

        Raises:
            DflashError: no server, no such model, or an input that the model does not have.
        """

    async def send(self, prompt: str, seed: int, trace: Trace, schema: str | None = None) -> None:
        """Sends a request and writes what arrives into `trace`, until the final response.

        Args:
            seed: the request's sampling seed.
            schema: the JSON schema that the answer follows, as text.

        Raises:
            ServedModelError: no final response came.
        """

    async def read_metrics(self) -> dict[str, float]:
        """What the server's metrics tell of drafts now (`draft_counts.read_metrics`)."""

    async def is_alive(self) -> bool:
        """Whether the server answers now."""

    async def close(self) -> None:
        """Closes the connections."""

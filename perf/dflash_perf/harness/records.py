"""One request as it was measured: what metrics are computed from, and a line of requests.jsonl."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from dflash_perf.harness.config import Goodput

TokenSource = Literal["output_ids", "counts", "tokenizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounts:
    """What a server says about a request at its end; None is not offered.

    Args:
        verify_steps, drafted_tokens, accepted_tokens: the server's own counts.
        histogram: item i counts the verify steps that emitted i + 1 tokens.
        position_trials: item j counts the steps that reached draft j + 1 of the block.
        position_accepts: item j counts those of `position_trials` where it was accepted.
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
    """A finished or failed request; seconds, all from one monotonic clock.

    A figure that was not measured or not offered is None, never 0.

    Args:
        index: which request of the run, in the order of sending.
        prompt: which of the prompts.
        sent_s: when it was sent, since the run's first request.
        delay_s: open loop: how long after its arrival it was really sent.
        ttft_s: sent → first text.
        e2e_s: sent → final response.
        output_tokens: counted as `token_source` says, never by messages.
        token_source: by token ids, by the server's count, or by tokenizing the text.
        count_differs: the server's own count is not the number of its token ids.
        messages: messages of the stream that carried output.
        error: why it failed; everything else may then be missing.
    """

    index: int
    prompt: int
    sent_s: float
    delay_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    token_source: TokenSource | None = None
    count_differs: bool = False
    messages: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def completed(self) -> bool:
        return self.error is None

    def to_json(self) -> dict[str, Any]:
        """Without what is at its default; times to the microsecond."""
        shown: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                shown[field.name] = round(value, 6) if isinstance(value, float) else value
        return shown

    @staticmethod
    def from_json(raw: dict[str, Any]) -> RequestRecord:
        """The record that `to_json` wrote; raises TypeError for anything else."""
        lists = {key: tuple(value) for key, value in raw.items() if isinstance(value, list)}
        return RequestRecord(**{**raw, **lists})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run: a configuration under one load, once.

    Args:
        window_s: first measured request sent → last final response.
        client_cpu_share: processor time of this process / wall time of the window; 1 is one core.
        loop_lag_p99_s: how late the event loop came to a task that was due, 99th percentile.
        gpus: throughput is divided by them; None is throughput of the whole server.
        goodput: the limits of a good request.
    """

    requests: tuple[RequestRecord, ...]
    window_s: float
    client_cpu_share: float
    loop_lag_p99_s: float | None = None
    gpus: int | None = None
    goodput: Goodput = Goodput()

    @property
    def completed(self) -> list[RequestRecord]:
        return [request for request in self.requests if request.completed]

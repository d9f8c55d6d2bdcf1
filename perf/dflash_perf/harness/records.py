"""Records of measured requests, from which metrics are computed; a line of requests.jsonl each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from dflash_perf.harness.sweep_config import Goodput

TokenSource = Literal["output_ids", "counts", "tokenizer"]


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
    """A finished or failed request. Times are seconds of one monotonic clock.

    A figure that was not measured or not reported is None, never 0.

    Args:
        index: its number in the run, in the order of sending.
        prompt: index of its prompt.
        set_name: the named set that has it; None where sets have no names.
        sent_s: when it was sent, since the run began.
        delay_s: open loop: how long after its due time it was sent.
        ttft_s: sent → first text.
        e2e_s: sent → final response.
        output_tokens: counted by `token_source`, never by messages.
        token_source: token ids, the server's count, or the client's tokenizer.
        count_differs: the server's count is not the number of its token ids.
        looping: whether the answer repeats itself (`runtime.loops`); None without token ids.
        messages: how many messages of the stream carried output.
        error: why it failed; other fields may then be missing.
    """

    index: int
    prompt: int
    set_name: str | None = None
    sent_s: float
    delay_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    token_source: TokenSource | None = None
    count_differs: bool = False
    looping: bool | None = None
    messages: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def completed(self) -> bool:
        return self.error is None

    def to_json(self) -> dict[str, Any]:
        """The fields that are not at their defaults; times to the microsecond."""
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
    """One run: one configuration under one load.

    Args:
        window_s: first measured request sent → last final response.
        client_cpu_share: processor time of this process / wall time of the run; 1 is one core.
        loop_lag_p99_s: 99th percentile of how late the event loop ran a task that was due.
        gpus: throughput is divided by their number; None is throughput of the whole server.
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

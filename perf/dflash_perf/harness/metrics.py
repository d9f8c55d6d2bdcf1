"""Metrics of one request and of one run: one class each, its formula in the docstring.

n is a request's output tokens, counted by token ids, the server's counts or a tokenizer, never
by stream messages: with speculation one message carries several tokens. A metric without data
is None, never 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from dflash_perf.harness.config import Goodput
from dflash_perf.harness.distribution import percentile
from dflash_perf.harness.records import RequestRecord, RunRecord


class RequestMetric(ABC):
    """A figure of every request; runs show its distribution."""

    tag: ClassVar[str]
    title: ClassVar[str]
    unit: ClassVar[str]

    @abstractmethod
    def of(self, request: RequestRecord) -> float | None:
        """Its value for a completed request."""


class TimeToFirstToken(RequestMetric):
    """TTFT = request sent → first text arrives."""

    tag, title, unit = "ttft", "Time to first token", "s"

    def of(self, request: RequestRecord) -> float | None:
        return request.ttft_s


class EndToEndLatency(RequestMetric):
    """E2E = request sent → final response."""

    tag, title, unit = "e2e", "End-to-end latency", "s"

    def of(self, request: RequestRecord) -> float | None:
        return request.e2e_s


class TimePerOutputToken(RequestMetric):
    """TPOT = (E2E - TTFT) / (n - 1); none with n < 2."""

    tag, title, unit = "tpot", "Time per output token", "s"

    def of(self, request: RequestRecord) -> float | None:
        n = request.output_tokens
        if request.ttft_s is None or request.e2e_s is None or n is None or n < 2:
            return None
        return (request.e2e_s - request.ttft_s) / (n - 1)


class EndToEndRate(RequestMetric):
    """End-to-end rate = n / E2E: a user's tokens per second with TTFT inside."""

    tag, title, unit = "end_to_end_rate", "End-to-end rate", "tokens/s"

    def of(self, request: RequestRecord) -> float | None:
        if not request.e2e_s or request.output_tokens is None:
            return None
        return request.output_tokens / request.e2e_s


class OutputTokens(RequestMetric):
    """Output tokens = n."""

    tag, title, unit = "output_tokens", "Output tokens", "tokens"

    def of(self, request: RequestRecord) -> float | None:
        return request.output_tokens


class InputTokens(RequestMetric):
    """Input tokens as the server counts them, else as the tokenizer does."""

    tag, title, unit = "input_tokens", "Input tokens", "tokens"

    def of(self, request: RequestRecord) -> float | None:
        return request.input_tokens


class SendDelay(RequestMetric):
    """Send delay = really sent - arrival (open loop): a slow client shows here."""

    tag, title, unit = "send_delay", "Send delay", "s"

    def of(self, request: RequestRecord) -> float | None:
        return request.delay_s


REQUEST_METRICS: tuple[RequestMetric, ...] = (
    TimeToFirstToken(),
    TimePerOutputToken(),
    EndToEndLatency(),
    EndToEndRate(),
    OutputTokens(),
    InputTokens(),
    SendDelay(),
)


class RunMetric(ABC):
    """A figure of a whole run."""

    tag: ClassVar[str]
    title: ClassVar[str]
    unit: ClassVar[str]

    @abstractmethod
    def of(self, run: RunRecord) -> float | None:
        """Its value, from the run's completed requests unless it says otherwise."""


class OutputThroughput(RunMetric):
    """Output throughput = output tokens / window; no input tokens in it."""

    tag, title, unit = "output_throughput", "Output throughput", "tokens/s"

    def of(self, run: RunRecord) -> float | None:
        counts = [request.output_tokens for request in run.completed]
        if not counts or run.window_s <= 0 or None in counts:
            return None
        return sum(count for count in counts if count is not None) / run.window_s


class OutputThroughputPerGpu(RunMetric):
    """Output throughput per GPU = output tokens / window / GPUs used; none without GPUs given."""

    tag, title, unit = "output_throughput_per_gpu", "Output throughput per GPU", "tokens/s/GPU"

    def of(self, run: RunRecord) -> float | None:
        throughput = OutputThroughput().of(run)
        return None if throughput is None or run.gpus is None else throughput / run.gpus


class Interactivity(RunMetric):
    """Interactivity = 1 / median TPOT: tokens/s per user; seconds are ranked, then inverted."""

    tag, title, unit = "interactivity", "Interactivity", "tokens/s per user"

    def of(self, run: RunRecord) -> float | None:
        values = [value for one in run.completed if (value := TimePerOutputToken().of(one))]
        return 1 / percentile(values, 50) if values else None


class RequestThroughput(RunMetric):
    """Request throughput = completed requests / window."""

    tag, title, unit = "request_throughput", "Request throughput", "requests/s"

    def of(self, run: RunRecord) -> float | None:
        return len(run.completed) / run.window_s if run.window_s > 0 else None


class GoodputRate(RunMetric):
    """Goodput = completed requests that meet every given limit (TTFT, TPOT, E2E) / window.

    A request without the figure that a limit is about (TPOT of a single token) does not break it.
    """

    tag, title, unit = "goodput", "Goodput", "requests/s"

    def __init__(self, limits: Goodput) -> None:
        self._limits = (
            (TimeToFirstToken(), limits.ttft),
            (TimePerOutputToken(), limits.tpot),
            (EndToEndLatency(), limits.e2e),
        )

    def of(self, run: RunRecord) -> float | None:
        if all(limit is None for _, limit in self._limits) or run.window_s <= 0:
            return None
        return sum(map(self.is_good, run.completed)) / run.window_s

    def is_good(self, request: RequestRecord) -> bool:
        """Whether a completed request meets all limits."""
        return all(
            limit is None or (value := metric.of(request)) is None or value * 1e3 <= limit
            for metric, limit in self._limits
        )


class AcceptanceLength(RunMetric):
    """Acceptance length τ = tokens emitted by verify steps / verify steps, bonus included.

    The first token comes from the prefill: without a histogram, emitted = n - 1.
    None where nothing was drafted.
    """

    tag, title, unit = "acceptance_length", "Acceptance length", "tokens/step"

    def of(self, run: RunRecord) -> float | None:
        emitted = steps = 0
        for request in run.completed:
            if not request.drafted_tokens or not request.verify_steps:
                continue
            if request.histogram:
                emitted += sum(i * count for i, count in enumerate(request.histogram, start=1))
                steps += sum(request.histogram)
            elif request.output_tokens:
                emitted += request.output_tokens - 1
                steps += request.verify_steps
        return emitted / steps if steps else None


class AcceptanceRate(RunMetric):
    """Acceptance rate = accepted drafts / drafts; None where nothing was drafted."""

    tag, title, unit = "acceptance_rate", "Acceptance rate", "of drafts"

    def of(self, run: RunRecord) -> float | None:
        pairs = [
            (request.accepted_tokens, request.drafted_tokens)
            for request in run.completed
            if request.accepted_tokens is not None and request.drafted_tokens
        ]
        drafted = sum(count for _, count in pairs)
        return sum(count for count, _ in pairs) / drafted if drafted else None


class FailedShare(RunMetric):
    """Failed share = failed requests / requests sent."""

    tag, title, unit = "failed_share", "Failed requests", "of requests"

    def of(self, run: RunRecord) -> float | None:
        sent = len(run.requests)
        return (sent - len(run.completed)) / sent if sent else None


class ClientCpuShare(RunMetric):
    """Client CPU share = processor time of the measuring process / window; 1 is a whole core."""

    tag, title, unit = "client_cpu_share", "Client CPU share", "of one core"

    def of(self, run: RunRecord) -> float | None:
        return run.client.cpu_share


def run_metrics(limits: Goodput) -> tuple[RunMetric, ...]:
    """All metrics of a run, in the order in which they are shown."""
    return (
        Interactivity(),
        OutputThroughput(),
        OutputThroughputPerGpu(),
        RequestThroughput(),
        GoodputRate(limits),
        AcceptanceLength(),
        AcceptanceRate(),
        FailedShare(),
        ClientCpuShare(),
    )


def definition(metric: RequestMetric | RunMetric) -> str:
    """The metric's formula, to print beside its figures."""
    paragraph = (type(metric).__doc__ or "").strip().split("\n\n")[0]
    return " ".join(paragraph.split())

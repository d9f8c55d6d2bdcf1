"""Metrics of one request and of one run: a function each, its formula in the docstring.

n is the number of a request's output tokens, by token ids, the server's count or a tokenizer.
Messages are never counted: with speculation one carries several tokens. A metric without data is
None, never 0. A run's metrics cover its completed requests unless they say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import numpy as np

from dflash_perf.harness.records import RequestRecord, RunRecord

RequestMetric = Callable[[RequestRecord], float | None]
RunMetric = Callable[[RunRecord], float | None]
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
CONFIDENCE = 0.95


def describe(values: Sequence[float]) -> dict[str, float]:
    """avg, min, max, percentiles and the population standard deviation (divided by n)."""
    ranks = np.percentile(values, PERCENTILES)
    return {
        "avg": float(np.mean(values)),
        "min": float(min(values)),
        "max": float(max(values)),
        **{f"p{rank}": float(value) for rank, value in zip(PERCENTILES, ranks, strict=True)},
        "std": float(np.std(values)),
    }


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over repeated `runs`.

    `confidence_95_half_width` is half of the mean's confidence interval, by Student's t with
    runs - 1 degrees of freedom; None with a single run.
    """

    mean: float
    min: float
    max: float
    runs: int
    confidence_95_half_width: float | None

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """The spread of `values`; None if there are none."""
        if not values:
            return None
        count, half_width = len(values), None
        if count > 1:
            from scipy.special import stdtrit

            quantile = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
            half_width = quantile * float(np.std(values, ddof=1)) / math.sqrt(count)
        mean = math.fsum(values) / count
        return Spread(mean, min(values), max(values), count, half_width)


def ttft(request: RequestRecord) -> float | None:
    """TTFT = request sent → first text arrives."""
    return request.ttft_s


def e2e(request: RequestRecord) -> float | None:
    """E2E = request sent → final response."""
    return request.e2e_s


def tpot(request: RequestRecord) -> float | None:
    """TPOT = (E2E - TTFT) / (n - 1); none with n < 2."""
    n = request.output_tokens
    if request.ttft_s is None or request.e2e_s is None or n is None or n < 2:
        return None
    return (request.e2e_s - request.ttft_s) / (n - 1)


def output_tokens(request: RequestRecord) -> float | None:
    """Output tokens = n."""
    return request.output_tokens


def input_tokens(request: RequestRecord) -> float | None:
    """Input tokens as the server counts them; none where it does not say."""
    return request.input_tokens


def output_throughput(run: RunRecord) -> float | None:
    """Output throughput = output tokens / window; no input tokens in it."""
    counts = [request.output_tokens for request in run.completed]
    if not counts or run.window_s <= 0 or None in counts:
        return None
    return sum(count for count in counts if count is not None) / run.window_s


def output_throughput_per_gpu(run: RunRecord) -> float | None:
    """Output throughput per GPU = output tokens / window / GPUs used; none without GPUs given."""
    throughput = output_throughput(run)
    return None if throughput is None or run.gpus is None else throughput / run.gpus


def interactivity(run: RunRecord) -> float | None:
    """Interactivity = 1 / median TPOT: tokens/s per user; seconds are ranked, then inverted."""
    values = [value for one in run.completed if (value := tpot(one))]
    return 1 / float(np.median(values)) if values else None


def goodput(run: RunRecord) -> float | None:
    """Goodput = completed requests that meet every given limit (TTFT, TPOT, E2E) / window.

    A request without the figure that a limit is about (TPOT of a single token) does not break it.
    """
    asked = ((ttft, run.goodput.ttft), (tpot, run.goodput.tpot), (e2e, run.goodput.e2e))
    limits = [(metric, limit) for metric, limit in asked if limit is not None]
    if not limits or run.window_s <= 0:
        return None
    good = sum(
        all((value := metric(one)) is None or value * 1e3 <= limit for metric, limit in limits)
        for one in run.completed
    )
    return good / run.window_s


def acceptance_length(run: RunRecord) -> float | None:
    """Acceptance length τ = tokens emitted by verify steps / verify steps, bonus included.

    The first token comes from the prefill: without a histogram, emitted = n - 1. Where answers
    tell nothing, the server's counters tell, of the steps that had drafts. None where nothing was
    drafted.
    """
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
    if steps or run.drafts is None:
        return emitted / steps if steps else None
    return run.drafts.length if run.drafts.drafted != 0 else None


def client_cpu_share(run: RunRecord) -> float | None:
    """Client CPU share = processor time of the measuring process / wall time; 1 is a whole core."""
    return run.client_cpu_share


_OF_REQUESTS = (ttft, tpot, e2e, output_tokens, input_tokens)
REQUEST_METRICS: dict[str, RequestMetric] = {one.__name__: one for one in _OF_REQUESTS}
_OF_RUNS = [interactivity, output_throughput, output_throughput_per_gpu, goodput]
_OF_RUNS += [acceptance_length, client_cpu_share]
RUN_METRICS: dict[str, RunMetric] = {one.__name__: one for one in _OF_RUNS}
"""Metrics by tag, in the order of reports."""


def definition(metric: RequestMetric | RunMetric) -> str:
    """The metric's formula, which reports print: the first paragraph of its docstring."""
    return " ".join((metric.__doc__ or "").partition("\n\n")[0].split())


@dataclass(frozen=True, slots=True)
class AcceptanceProfile:
    """Acceptance over all completed requests with drafts.

    Args:
        histogram: item i counts the verify steps that emitted i + 1 tokens.
        conditional: item j is the share of drafts accepted at position j + 1, given that all
            before it in their block were; None where no step got that far.
        conditional_basis: `trials` if the server counts positions, else `histogram`. A block that
            a stop or limit cut short then looks rejected: at most one step per request.
    """

    histogram: tuple[int, ...]
    conditional: tuple[float | None, ...]
    conditional_basis: Literal["trials", "histogram"]

    @property
    def acceptance_length(self) -> float:
        """τ: tokens emitted by verify steps / verify steps, bonus included."""
        emitted = sum(i * count for i, count in enumerate(self.histogram, start=1))
        return emitted / sum(self.histogram)

    @staticmethod
    def of(requests: Iterable[RequestRecord]) -> AcceptanceProfile | None:
        """The profile of `requests`; None if the server reports no histogram or drafted nothing."""
        drafted = [one for one in requests if one.completed and one.drafted_tokens]
        histogram = _sum_columns(one.histogram for one in drafted)
        if len(histogram) < 2:
            return None
        if all(one.position_trials and one.position_accepts for one in drafted):
            trials = _sum_columns(one.position_trials for one in drafted)
            accepts = _sum_columns(one.position_accepts for one in drafted)
            return AcceptanceProfile(histogram, _ratios(accepts, trials), "trials")
        # reached[j]: steps that accepted at least j drafts.
        reached = [sum(histogram[j:]) for j in range(len(histogram))]
        return AcceptanceProfile(histogram, _ratios(reached[1:], reached[:-1]), "histogram")


def _sum_columns(rows: Iterable[tuple[int, ...] | None]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*(r for r in rows if r), fillvalue=0))


def _ratios(accepts: Iterable[int], trials: Iterable[int]) -> tuple[float | None, ...]:
    return tuple(a / t if t else None for a, t in zip(accepts, trials, strict=True))

"""A request's times, and how many of its drafts were accepted.

A "step" is one decode pass of the target; TTFT is from submission to the first token, which comes
from the prefill. What a stop or max_tokens cuts off a block counts neither as emitted nor as
accepted, but as drafted. A figure that was not measured is None, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from statistics import median
from typing import Any, ClassVar

JsonValue = int | float | list[int] | list[float | None] | None
_OF_GRAMMARS = ("constrained_acceptance_length", "forced_tokens", "grammar_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceStatistics:
    """Counts of tokens and decode steps.

    Args:
        steps: decode passes of the target; a pass without drafts counts too.
        drafted_tokens: drafts verified, (rows - 1) of every step.
        accepted_tokens: drafts emitted.
        acceptance_histogram: item i counts the steps that emitted i + 1 tokens, so the items
            sum to `steps` and sum((i + 1) * item) = emitted tokens.
        position_trials: item j counts the steps in which draft j + 1 of the block was reached:
            it existed, all before it were accepted, and no stop or limit came before it.
        position_accepts: item j counts those of `position_trials` in which it was accepted.
        cached_prompt_tokens: the prompt's whose rows other requests had computed; None where
            caches are linear and there were none.
        preemptions: how often pages were lost; None as `cached_prompt_tokens`.
        constrained_steps: of `steps`, those of requests with a grammar.
        constrained_step_tokens: tokens that those emitted.
        forced_tokens: drafts that a grammar put in place of the drafter's; None without one.
        grammar_s: processor time in the grammar; None without one.
    """

    _told: ClassVar[tuple[str, ...]] = (
        *("prompt_tokens", "cached_prompt_tokens", "output_tokens", "preemptions", "steps"),
        *("drafted_tokens", "accepted_tokens", "acceptance_length", "acceptance_rate"),
        *("acceptance_histogram", "conditional_acceptance", *_OF_GRAMMARS),
    )
    """Names of what JSON has."""

    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    position_trials: tuple[int, ...] = ()
    position_accepts: tuple[int, ...] = ()
    prompt_tokens: int
    output_tokens: int
    cached_prompt_tokens: int | None = None
    preemptions: int | None = None
    constrained_steps: int = 0
    constrained_step_tokens: int = 0
    forced_tokens: int | None = None
    grammar_s: float | None = None

    @property
    def drafted_steps(self) -> int:
        """Steps that had a draft."""
        return self.position_trials[0] if self.position_trials else 0

    @property
    def step_tokens(self) -> int:
        """Tokens that steps emitted."""
        return sum(i * count for i, count in enumerate(self.acceptance_histogram, start=1))

    @property
    def acceptance_length(self) -> float | None:
        """tau = tokens emitted by steps / steps; None when nothing was drafted."""
        return self.step_tokens / self.steps if self.drafted_tokens else None

    @property
    def constrained_acceptance_length(self) -> float | None:
        """The same of requests with a grammar; None when there were none."""
        if not self.drafted_tokens or not self.constrained_steps:
            return None
        return self.constrained_step_tokens / self.constrained_steps

    @property
    def acceptance_rate(self) -> float | None:
        """accepted_tokens / drafted_tokens; None when nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def conditional_acceptance(self) -> tuple[float | None, ...]:
        """Per draft position 1, 2, …: accepted there, given accepted everywhere before it."""
        return tuple(
            accepts / trials if trials else None
            for accepts, trials in zip(self.position_accepts, self.position_trials, strict=True)
        )

    def to_json(self) -> dict[str, JsonValue]:
        """The figures, those of grammars where there was one."""
        untold = _OF_GRAMMARS if self.grammar_s is None else ()
        values = {name: getattr(self, name) for name in self._told if name not in untold}
        return {name: [*one] if isinstance(one, tuple) else one for name, one in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatistics(AcceptanceStatistics):
    """A request's counts, and times in seconds from submission; `queue_s` is to its prefill."""

    _told = (
        *AcceptanceStatistics._told,
        *("time_to_first_token_s", "time_per_output_token_s", "tokens_per_second", "end_to_end_s"),
    )

    queue_s: float | None = None
    time_to_first_token_s: float | None = None
    end_to_end_s: float | None = None

    def __post_init__(self) -> None:
        if self.grammar_s is not None:  # which all its steps have then
            object.__setattr__(self, "constrained_steps", self.steps)
            object.__setattr__(self, "constrained_step_tokens", self.step_tokens)

    @property
    def decode_s(self) -> float | None:
        """E2E - TTFT; None with fewer than two output tokens or an unmeasurable time."""
        if self.time_to_first_token_s is None or self.end_to_end_s is None:
            return None
        seconds = self.end_to_end_s - self.time_to_first_token_s
        return seconds if self.output_tokens >= 2 and seconds > 0 else None

    @property
    def time_per_output_token_s(self) -> float | None:
        """TPOT = (E2E - TTFT) / (output_tokens - 1)."""
        return None if self.decode_s is None else self.decode_s / (self.output_tokens - 1)

    @property
    def tokens_per_second(self) -> float | None:
        """(output_tokens - 1) / (E2E - TTFT), the inverse of TPOT."""
        return None if self.decode_s is None else (self.output_tokens - 1) / self.decode_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalStatistics(AcceptanceStatistics):
    """Many requests: summed counts, median times, throughput over the measured window.

    `interactivity` (tokens/s per user) is 1 / median TPOT: the median is taken on seconds per
    token and inverted last. `output_throughput` (tokens/s) is all output tokens / `wall_s`.
    """

    _told = (
        *("requests", *AcceptanceStatistics._told, "median_time_to_first_token_s"),
        *("median_time_per_output_token_s", "interactivity", "wall_s", "output_throughput"),
    )

    requests: int
    median_time_to_first_token_s: float | None
    median_time_per_output_token_s: float | None
    wall_s: float | None

    @property
    def interactivity(self) -> float | None:
        tpot = self.median_time_per_output_token_s
        return 1 / tpot if tpot else None

    @property
    def output_throughput(self) -> float | None:
        return self.output_tokens / self.wall_s if self.wall_s else None


def total(requests: Iterable[RequestStatistics], wall_s: float | None = None) -> TotalStatistics:
    """Sums `requests`; `wall_s` is the measured window they ran in, where there was one."""
    each = list(requests)
    sums: dict[str, Any] = {}
    for one in fields(AcceptanceStatistics):
        values = [getattr(request, one.name) for request in each]
        if one.default == ():
            sums[one.name] = tuple(map(sum, zip_longest(*values, fillvalue=0)))
        else:
            known = [value for value in values if value is not None]
            sums[one.name] = sum(known) if known or one.default is not None else None
    return TotalStatistics(
        requests=len(each),
        median_time_to_first_token_s=_median(one.time_to_first_token_s for one in each),
        median_time_per_output_token_s=_median(one.time_per_output_token_s for one in each),
        wall_s=wall_s,
        **sums,
    )


class Stopwatch:
    """Adds the seconds of every `with` block to `seconds`, also of one that raises."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = 0.0
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._started = self._clock()

    def __exit__(self, *error: object) -> None:
        self.seconds += self._clock() - self._started


@dataclass(slots=True)
class RunningTotals:
    """Counts what all requests of a generator have done by now; the names are a request's.

    Prompt tokens are those whose rows are in the caches, once each; `position_accepts` are as
    a request has them. One thread writes, others may read.
    """

    preemptions: int = 0
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0
    position_accepts: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    yields: int = 0
    drafted_steps: int = 0
    step_tokens: int = 0
    constrained_steps: int = 0
    constrained_step_tokens: int = 0
    grammar_s: float = 0.0


@dataclass(slots=True)
class StatisticsRecorder:
    """Counts one request's steps as they happen, and adds them to `totals`.

    All times come from one monotonic clock; `grammar_s` is None where it has no grammar. `counts`
    are of steps by rows, drafts reached, drafts accepted and tokens emitted.
    """

    submitted_at: float
    totals: RunningTotals = field(default_factory=RunningTotals)
    prompt_tokens: int = 0
    grammar_s: float | None = None
    started_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    cached_prompt_tokens: int | None = None
    preemptions: int = 0
    forced_tokens: int = 0
    counts: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)

    def record_prompt(self, cached: int) -> None:
        """Counts the prompt's tokens, of which so many are in the cache; again is not counted."""
        self.totals.prompt_tokens += max(cached - self.prompt_tokens, 0)
        self.prompt_tokens = max(cached, self.prompt_tokens)

    def record_shared(self, cached: int) -> None:
        """Counts the tokens that it begins with, and other requests had computed."""
        if self.cached_prompt_tokens is None:
            self.cached_prompt_tokens = cached
            self.totals.cached_prompt_tokens += cached
            self.record_prompt(cached)

    def record_grammar(self, seconds: float) -> None:
        """Counts processor time in the grammar: all of the request's until now."""
        self.totals.grammar_s += seconds - (self.grammar_s or 0.0)
        self.grammar_s = seconds

    def record_step(self, rows: int, verified: int, emitted: int) -> tuple[int, int]:
        """Counts one decode step; returns how many drafts were reached, and how many emitted.

        Args:
            rows: rows of the pass: the anchor and rows - 1 drafts.
            verified: tokens the pass settled, accepted drafts + bonus (1 … rows).
            emitted: how many of those the request took (1 … verified); fewer after a stop.
        """
        accepted = min(verified - 1, emitted)
        trials = accepted if emitted < verified else min(verified, rows - 1)
        self.counts[rows, trials, accepted, emitted] += 1
        totals = self.totals
        totals.steps += 1
        totals.drafted_tokens += rows - 1
        totals.accepted_tokens += accepted
        _count(totals.position_accepts, rows - 1, accepted)
        totals.drafted_steps += trials > 0
        totals.step_tokens += emitted
        if self.grammar_s is not None:
            totals.constrained_steps += 1
            totals.constrained_step_tokens += emitted
        return trials, accepted

    def freeze(self, prompt_tokens: int, output_tokens: int) -> RequestStatistics:
        """The statistics."""

        def since_submission(moment: float | None) -> float | None:
            return None if moment is None else moment - self.submitted_at

        histogram, trials, accepts = list[int](), list[int](), list[int]()
        for (rows, reached, accepted, emitted), steps in self.counts.items():
            histogram += [0] * (rows - len(histogram))
            histogram[emitted - 1] += steps
            _count(trials, rows - 1, reached, steps)
            _count(accepts, rows - 1, accepted, steps)
        return RequestStatistics(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            preemptions=None if self.cached_prompt_tokens is None else self.preemptions,
            forced_tokens=None if self.grammar_s is None else self.forced_tokens,
            grammar_s=self.grammar_s,
            steps=self.counts.total(),
            drafted_tokens=sum((rows - 1) * steps for (rows, *_), steps in self.counts.items()),
            accepted_tokens=sum(accepts),
            acceptance_histogram=tuple(histogram),
            position_trials=tuple(trials),
            position_accepts=tuple(accepts),
            queue_s=since_submission(self.started_at),
            time_to_first_token_s=since_submission(self.first_token_at),
            end_to_end_s=since_submission(self.finished_at),
        )


def _count(counts: list[int], size: int, first: int, more: int = 1) -> None:
    """Adds `more` at each of the `first` places; there are `size` at least."""
    counts += [0] * (size - len(counts))
    for place in range(first):
        counts[place] += more


def _median(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return median(measured) if measured else None

"""The figures of one run, and of a point: all repeats of one configuration and load."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from dflash_perf.harness.load_metrics import (
    REQUEST_METRICS,
    RUN_METRICS,
    AcceptanceProfile,
    Spread,
    acceptance_length,
    describe,
    interactivity,
)
from dflash_perf.harness.records import RequestRecord, RunRecord
from dflash_perf.harness.sweep_config import REQUESTS_PER_STREAM, OfferedLoad
from dflash_trt.text.task_sets import ALL

BUSY_CLIENT = 0.8

SET_METRICS = {"interactivity": interactivity, "acceptance_length": acceptance_length}
"""Run metrics that say something about some of a run's requests; throughput is of all together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSummary:
    """The requests of a set in a run, or all of them.

    Args:
        requests, completed: how many were sent, and how many were answered.
        output_tokens, verify_steps: sums over the answers of which they are known.
        values: SET_METRICS by tag, over answers that do not loop (`decoding.loops`).
        looping: how many answers do; None where no server told token ids.
    """

    name: str
    requests: int
    completed: int
    output_tokens: int
    verify_steps: int
    values: dict[str, float]
    looping: int | None = None

    @staticmethod
    def of(name: str, requests: Sequence[RequestRecord], run: RunRecord) -> SetSummary:
        """The summary of `requests`, which are some of `run`'s."""
        completed = [one for one in requests if one.completed]
        counted = [one for one in completed if not one.looping]
        part = replace(run, requests=tuple(counted))
        is_known = any(one.looping is not None for one in completed)
        return SetSummary(
            name=name,
            requests=len(requests),
            completed=len(completed),
            output_tokens=sum(one.output_tokens or 0 for one in counted),
            verify_steps=sum(one.verify_steps or 0 for one in counted),
            values={
                tag: value for tag, of in SET_METRICS.items() if (value := of(part)) is not None
            },
            looping=len(completed) - len(counted) if is_known else None,
        )


def summarize_sets(run: RunRecord) -> tuple[SetSummary, ...]:
    """A summary of each named set of a run in the order they were given, then of all requests."""
    by_name: dict[str, list[RequestRecord]] = {}
    for one in sorted(run.requests, key=lambda request: request.prompt):  # sets follow each other
        if one.set_name is not None:
            by_name.setdefault(one.set_name, []).append(one)
    parts: list[tuple[str, Sequence[RequestRecord]]] = [*by_name.items(), (ALL, run.requests)]
    return tuple(SetSummary.of(name, requests, run) for name, requests in parts)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Identifies a run: configuration, load and repeat (0, 1, …); each repeat has its seed."""

    configuration: str
    load: OfferedLoad
    repeat: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary(RunPlan):
    """The figures of one run; the content of its summary.json.

    Args:
        requests, completed: how many requests were sent, and how many were answered.
        errors: how many requests failed, by message.
        token_sources: how many requests' tokens were counted in each way.
        values: run metrics by tag; those without data are missing.
        distributions: request metrics by tag, as from `describe`.
        ended_early: requests with fewer output tokens than `exact_tokens`.
        short: answers that were empty or ended after a token, of their own accord.
        sets: figures of each named set, then of all requests.
    """

    requests: int
    completed: int
    errors: dict[str, int]
    token_sources: dict[str, int]
    values: dict[str, float]
    distributions: dict[str, dict[str, float]]
    acceptance: AcceptanceProfile | None
    ended_early: int
    sets: tuple[SetSummary, ...] = ()
    short: int = 0

    @staticmethod
    def of(plan: RunPlan, run: RunRecord, exact_tokens: int | None = None) -> RunSummary:
        """The summary of `run`; `exact_tokens` is the fixed output length of requests, if any."""
        completed, exact = run.completed, exact_tokens or 0
        found = {
            tag: [value for one in completed if (value := metric(one)) is not None]
            for tag, metric in REQUEST_METRICS.items()
        }
        run_values = ((tag, metric(run)) for tag, metric in RUN_METRICS.items())
        return RunSummary(
            configuration=plan.configuration,
            load=plan.load,
            repeat=plan.repeat,
            seed=plan.seed,
            requests=len(run.requests),
            completed=len(completed),
            errors=dict(Counter(one.error for one in run.requests if one.error is not None)),
            token_sources=dict(Counter(one.token_source or "not counted" for one in completed)),
            values={tag: value for tag, value in run_values if value is not None},
            distributions={tag: describe(values) for tag, values in found.items() if values},
            acceptance=AcceptanceProfile.of(completed),
            ended_early=sum((one.output_tokens or 0) < exact for one in completed),
            sets=summarize_sets(run),
            short=sum(one.is_short for one in completed),
        )

    def to_json(self) -> dict[str, Any]:
        raw: dict[str, Any] = _SUMMARIES.dump_python(self, mode="json")
        return raw

    @staticmethod
    def from_json(raw: Any) -> RunSummary:
        """What `to_json` wrote; raises ValueError for anything else."""
        return _SUMMARIES.validate_python(raw)


_SUMMARIES = TypeAdapter(RunSummary)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One configuration under one load, with all its repeats."""

    configuration: str
    load: OfferedLoad
    runs: tuple[RunSummary, ...]

    @property
    def requests(self) -> int:
        return sum(run.requests for run in self.runs)

    @property
    def failed(self) -> int:
        return sum(run.requests - run.completed for run in self.runs)

    def value(self, tag: str) -> Spread | None:
        """A run metric over the repeats; None unless every run has it."""
        values = [run.values[tag] for run in self.runs if tag in run.values]
        return Spread.of(values) if len(values) == len(self.runs) else None

    def quantile(self, tag: str, statistic: str) -> float | None:
        """A request metric's statistic ("p50", "avg", …), averaged over the repeats."""
        values = [
            run.distributions[tag][statistic] for run in self.runs if tag in run.distributions
        ]
        return math.fsum(values) / len(values) if values else None

    @property
    def set_names(self) -> tuple[str, ...]:
        """The named sets of its requests."""
        named = (one.name for run in self.runs for one in run.sets if one.name != ALL)
        return tuple(dict.fromkeys(named))

    def set_value(self, name: str, tag: str) -> Spread | None:
        """One of SET_METRICS of a named set over the repeats; None unless every run has it."""
        found = [one.values[tag] for one in self.of_set(name) if tag in one.values]
        return Spread.of(found) if len(found) == len(self.runs) else None

    def of_set(self, name: str) -> list[SetSummary]:
        """The set's part in every run that has it."""
        return [one for run in self.runs for one in run.sets if one.name == name]

    @property
    def interactivity(self) -> float | None:
        """tokens/s per user: 1 / (median TPOT, averaged over the repeats); inverted last."""
        median = self.quantile("tpot", "p50")
        return 1 / median if median else None

    @property
    def throughput(self) -> Spread | None:
        """tokens/s, per GPU where their number is known, else of the server."""
        return self.value("output_throughput_per_gpu") or self.value("output_throughput")

    @property
    def notes(self) -> list[str]:
        """Reasons to trust the figures less, as sentences for the report."""
        notes: list[str] = []
        fewest = min(run.requests for run in self.runs)
        wanted = REQUESTS_PER_STREAM * (self.load.concurrency or 0)
        if self.failed:
            notes.append(f"{self.failed} of {self.requests} requests failed")
        if fewest < wanted:
            notes.append(f"{fewest} requests a run, fewer than {wanted} (10 × concurrency)")
        busiest = max(run.values.get("client_cpu_share", 0.0) for run in self.runs)
        if busiest > BUSY_CLIENT:
            notes.append(f"the client used {busiest:.0%} of a core: it may be the bottleneck")
        if early := sum(run.ended_early for run in self.runs):
            notes.append(f"{early} requests ended early: the server does not ignore eos")
        if short := sum(run.short for run in self.runs):
            what = f"{short} of {self.requests} answers were empty or ended after one token"
            notes.append(f"{what}: without a TPOT they count for nothing")
        if looping := sum(one.looping or 0 for one in self.of_set(ALL)):
            others = self.set_value(ALL, "acceptance_length")
            without = "" if others is None else f", which is {others.mean:.2f} without them"
            what = f"{looping} of {self.requests} answers repeat themselves"
            notes.append(f"{what}; they inflate τ{without}")
        return notes

    def to_json(self) -> dict[str, Any]:
        tags = dict.fromkeys(tag for run in self.runs for tag in run.values)
        found = dict.fromkeys(tag for run in self.runs for tag in run.distributions)
        return {
            "configuration": self.configuration,
            "load": self.load.model_dump(exclude_none=True),
            "interactivity": self.interactivity,
            "values": {
                tag: asdict(spread) for tag in tags if (spread := self.value(tag)) is not None
            },
            "quantiles": {
                tag: {rank: self.quantile(tag, rank) for rank in ("avg", "p50", "p90", "p99")}
                for tag in found
            },
            "requests": self.requests,
            "failed": self.failed,
            "notes": self.notes,
            "sets": [self._set_to_json(name) for name in self.set_names],
        }

    def _set_to_json(self, name: str) -> dict[str, Any]:
        parts = self.of_set(name)
        found = ((tag, self.set_value(name, tag)) for tag in SET_METRICS)
        return {
            "name": name,
            "requests": sum(one.requests for one in parts),
            "failed": sum(one.requests - one.completed for one in parts),
            "output_tokens": sum(one.output_tokens for one in parts),
            "verify_steps": sum(one.verify_steps for one in parts),
            "looping": sum(one.looping or 0 for one in parts),
            "values": {tag: asdict(spread) for tag, spread in found if spread is not None},
        }


def group(runs: Iterable[RunSummary]) -> list[SweepPoint]:
    """Points of runs: configurations in order of appearance, loads from light to heavy."""
    by_point: dict[tuple[str, str], list[RunSummary]] = {}
    for run in runs:
        by_point.setdefault((run.configuration, run.load.slug), []).append(run)
    names = list(dict.fromkeys(name for name, _ in by_point))
    points = [
        SweepPoint(name, found[0].load, tuple(sorted(found, key=lambda run: run.repeat)))
        for (name, _), found in by_point.items()
    ]
    return sorted(points, key=lambda point: (names.index(point.configuration), point.load.order))

"""The figures of one run, and of a point: all repeats of one configuration and load."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from dflash_perf.harness.distribution import Spread, describe
from dflash_perf.harness.load import REQUESTS_PER_STREAM
from dflash_perf.harness.load_metrics import (
    REQUEST_METRICS,
    RUN_METRICS,
    AcceptanceProfile,
    acceptance_length,
    acceptance_rate,
    interactivity,
)
from dflash_perf.harness.load_prompts import RANDOM_WORDS
from dflash_perf.harness.records import RequestRecord, RunRecord
from dflash_perf.harness.sweep_config import OfferedLoad
from dflash_trt.text.task_sets import ALL

BUSY_CLIENT = 0.8

SET_METRICS = {
    "interactivity": interactivity,
    "acceptance_length": acceptance_length,
    "acceptance_rate": acceptance_rate,
}
"""Run metrics that say something about some of a run's requests; throughput is of all together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSummary:
    """The requests of a set in a run, or all of them.

    Args:
        requests, completed: how many were sent, and how many were answered.
        output_tokens, verify_steps: sums over the answers of which they are known.
        values: SET_METRICS by tag, over answers that do not loop (`runtime.loops`).
        looping: how many answers do; None where no server told token ids.
        looping_acceptance_length: of those alone.
    """

    name: str
    requests: int
    completed: int
    output_tokens: int
    verify_steps: int
    values: dict[str, float]
    looping: int | None = None
    looping_acceptance_length: float | None = None

    @staticmethod
    def of(name: str, requests: Sequence[RequestRecord], run: RunRecord) -> SetSummary:
        """The summary of `requests`, which are some of `run`'s."""
        completed = [one for one in requests if one.completed]
        counted = [one for one in completed if not one.looping]
        part = replace(run, requests=tuple(counted))
        looping = replace(run, requests=tuple(one for one in completed if one.looping))
        values = ((tag, metric(part)) for tag, metric in SET_METRICS.items())
        is_known = any(one.looping is not None for one in completed)
        return SetSummary(
            name=name,
            requests=len(requests),
            completed=len(completed),
            output_tokens=sum(one.output_tokens or 0 for one in counted),
            verify_steps=sum(one.verify_steps or 0 for one in counted),
            values={tag: value for tag, value in values if value is not None},
            looping=len(looping.requests) if is_known else None,
            looping_acceptance_length=acceptance_length(looping),
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
        window_s, loop_lag_p99_s: see `RunRecord`.
        errors: how many requests failed, by message.
        token_sources: how many requests' tokens were counted in each way.
        values: run metrics by tag; those without data are missing.
        distributions: request metrics by tag, as from `distribution.describe`.
        count_differs: requests whose number of token ids differs from the server's count.
        sets: figures of each named set, then of all requests; empty in results of an older version.
        ended_early: requests with fewer output tokens than `exact_tokens`.
    """

    requests: int
    completed: int
    window_s: float
    errors: dict[str, int]
    token_sources: dict[str, int]
    values: dict[str, float]
    distributions: dict[str, dict[str, float]]
    acceptance: AcceptanceProfile | None
    count_differs: int
    ended_early: int
    loop_lag_p99_s: float | None
    sets: tuple[SetSummary, ...] = ()

    @staticmethod
    def of(plan: RunPlan, run: RunRecord, exact_tokens: int | None = None) -> RunSummary:
        """The summary of `run`; `exact_tokens` is the fixed output length of requests, if any."""
        completed = run.completed
        distributions: dict[str, dict[str, float]] = {}
        for tag, metric in REQUEST_METRICS.items():
            values = [value for one in completed if (value := metric(one)) is not None]
            if values:
                distributions[tag] = describe(values)
        run_values = ((tag, metric(run)) for tag, metric in RUN_METRICS.items())
        return RunSummary(
            configuration=plan.configuration,
            load=plan.load,
            repeat=plan.repeat,
            seed=plan.seed,
            requests=len(run.requests),
            completed=len(completed),
            window_s=run.window_s,
            errors=dict(Counter(one.error for one in run.requests if one.error is not None)),
            token_sources=dict(Counter(one.token_source or "not counted" for one in completed)),
            values={tag: value for tag, value in run_values if value is not None},
            distributions=distributions,
            acceptance=AcceptanceProfile.of(completed),
            count_differs=sum(one.count_differs for one in completed),
            ended_early=sum(
                exact_tokens is not None and (one.output_tokens or 0) < exact_tokens
                for one in completed
            ),
            loop_lag_p99_s=run.loop_lag_p99_s,
            sets=summarize_sets(run),
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
        if self.set_names == (RANDOM_WORDS,):
            notes.append("prompts are random words: acceptance, and speed with it, mean nothing")
        if differing := sum(run.count_differs for run in self.runs):
            notes.append(f"output_ids and the server's own count differ in {differing} requests")
        if early := sum(run.ended_early for run in self.runs):
            notes.append(f"{early} requests ended early: the server does not ignore eos")
        if looping := sum(one.looping or 0 for one in self.of_set(ALL)):
            notes.append(self._describe_loops(looping))
        return notes

    def _describe_loops(self, looping: int) -> str:
        """That so many answers repeat themselves, and what the others' acceptance length is."""
        others = self.set_value(ALL, "acceptance_length")
        without = "" if others is None else f", which is {others.mean:.2f} without them"
        return f"{looping} of {self.requests} answers repeat themselves; they inflate τ{without}"

    def to_json(self) -> dict[str, Any]:
        tags = sorted({tag for run in self.runs for tag in run.values})
        return {
            "configuration": self.configuration,
            "load": self.load.model_dump(),
            "interactivity": self.interactivity,
            "values": {
                tag: spread.to_json() for tag in tags if (spread := self.value(tag)) is not None
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
            "values": {tag: spread.to_json() for tag, spread in found if spread is not None},
        }


def group(runs: Iterable[RunSummary]) -> list[SweepPoint]:
    """Points of runs: configurations in order of appearance, loads from light to heavy."""
    by_point: dict[tuple[str, str], list[RunSummary]] = {}
    names: list[str] = []
    for run in runs:
        by_point.setdefault((run.configuration, run.load.slug), []).append(run)
        if run.configuration not in names:
            names.append(run.configuration)
    points = [
        SweepPoint(
            group[0].configuration, group[0].load, tuple(sorted(group, key=lambda r: r.repeat))
        )
        for group in by_point.values()
    ]
    return sorted(points, key=lambda point: (names.index(point.configuration), point.load.order))

"""A named set's part in a run, and in the points that repeats of it make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_perf.harness.metrics import acceptance_length, acceptance_rate, interactivity
from dflash_perf.harness.records import RequestRecord, RunRecord
from dflash_trt.text.task_sets import ALL

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

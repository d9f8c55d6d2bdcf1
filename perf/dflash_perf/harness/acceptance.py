"""What drafts were worth, summed over requests: histogram and conditional acceptance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from dflash_perf.harness.records import RequestRecord


@dataclass(frozen=True, slots=True)
class AcceptanceProfile:
    """Of all requests that were drafted for.

    Args:
        histogram: item i counts the verify steps that emitted i + 1 tokens.
        conditional: item j is the share of drafts accepted at position j + 1, given that all
            before it in their block were; None where none got so far.
        conditional_basis: `trials` where the server counts positions. From the `histogram` alone,
            a block that a stop or limit cut short looks rejected there: one step a request.
    """

    histogram: tuple[int, ...]
    conditional: tuple[float | None, ...]
    conditional_basis: Literal["trials", "histogram"]

    @staticmethod
    def of(requests: Iterable[RequestRecord]) -> AcceptanceProfile | None:
        """None where the server tells no histogram or drafted nothing."""
        drafted = [one for one in requests if one.completed and one.drafted_tokens]
        histogram = _sum(one.histogram for one in drafted)
        if not histogram or len(histogram) < 2:
            return None
        if all(one.position_trials and one.position_accepts for one in drafted):
            trials = _sum(one.position_trials for one in drafted)
            accepts = _sum(one.position_accepts for one in drafted)
            return AcceptanceProfile(histogram, _ratios(accepts, trials), "trials")
        # reached[j]: steps that accepted at least j drafts.
        reached = [sum(histogram[j:]) for j in range(len(histogram))]
        return AcceptanceProfile(histogram, _ratios(reached[1:], reached[:-1]), "histogram")


def _sum(rows: Iterable[tuple[int, ...] | None]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*(r for r in rows if r), fillvalue=0))


def _ratios(accepts: Iterable[int], trials: Iterable[int]) -> tuple[float | None, ...]:
    return tuple(a / t if t else None for a, t in zip(accepts, trials, strict=True))

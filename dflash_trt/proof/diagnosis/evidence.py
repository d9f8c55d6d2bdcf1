"""Evidence: everything that was measured, before anything is concluded from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.decoding.replay.replayed_acceptance import RECALL_AT, UNKNOWN, Acceptance, StepTable
from dflash_trt.proof.diagnosis.gain import Gain, count, length_interval, measure_gain
from dflash_trt.proof.diagnosis.trial import Trial

BREAK_EVEN = 1.5
"""Where nothing was measured. A step with drafts verifies a block and runs the draft besides: on a
CPU that took 1.5 to 2 times as long as a plain step at blocks of 4 to 8, on a GPU less."""


@dataclass(frozen=True, slots=True)
class Slots:
    """How often a slot's draft is the token before its own place, there, and behind it.

    `gain` is what the better of the neighbours has over the own place, relative to that.
    """

    agreement: Mapping[int, float]
    best_neighbour: int
    gain: Gain

    def to_json(self) -> dict[str, Any]:
        agreement = {f"{shift:+d}": value for shift, value in self.agreement.items()}
        return {"agreement": agreement, "gain": self.gain.to_json()}


@dataclass(frozen=True, slots=True)
class Group:
    """Answers of one set or tag, and how their acceptance compares with the other answers'."""

    name: str
    acceptance: Acceptance
    gain: Gain

    def to_json(self) -> dict[str, Any]:
        return {"gain": self.gain.to_json(), **self.acceptance.to_json()}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the verdict rests on.

    Args:
        base: the answers, replayed as the bundle is.
        trials: one thing changed each, on the same answers.
        others_context: with another answer's context; None for a single answer.
        forms: prompts in other forms, answered anew.
        groups: sets, then tags; none where there is only one.
        reference: other rows that the draft should be good at.
        break_even: tokens per step below which speculation does not pay.
    """

    base: Acceptance
    slots: Slots | None
    trials: Sequence[Trial]
    others_context: Trial | None
    forms: Sequence[Trial] = ()
    groups: Sequence[Group] = ()
    reference: Group | None = None
    break_even: float = BREAK_EVEN

    @property
    def tried(self) -> list[Trial]:
        """Everything that was changed, the best first."""
        context = [] if self.others_context is None else [self.others_context]
        trials = [*self.trials, *self.forms, *context]
        return sorted(trials, key=lambda trial: trial.gain.value, reverse=True)

    @property
    def expected(self) -> tuple[float, float]:
        """Where the acceptance length of answers like these lies."""
        return length_interval(count(self.base.per_answer))

    @property
    def oracle_length(self) -> float:
        """The acceptance length if the best of each slot's 16 likeliest tokens were drafted."""
        table = self.base.table
        if not len(table):
            return 0.0
        hits = (table.rank < RECALL_AT) & (table.rank != UNKNOWN)
        kept = np.logical_and.accumulate(hits, axis=1).sum(axis=1)
        return float(np.minimum(kept + 1, np.maximum(table.known, 1)).mean())

    def to_json(self) -> dict[str, Any]:
        return {
            "acceptance": self.base.to_json(),
            "interval": list(self.expected),
            "break_even": self.break_even,
            "oracle_acceptance_length": self.oracle_length,
            "slots": None if self.slots is None else self.slots.to_json(),
            "trials": [trial.to_json() for trial in self.trials],
            "others_context": self.others_context and self.others_context.to_json(),
            "forms": [trial.to_json() for trial in self.forms],
            "groups": {group.name: group.to_json() for group in self.groups},
            "reference": self.reference
            and {"name": self.reference.name, **self.reference.to_json()},
        }


def compare_slots(table: StepTable) -> Slots | None:
    """Which of its neighbours a slot's draft agrees with; None for blocks too short to tell."""
    if table.block_size < 3 or not len(table):
        return None
    drafts = table.draft_ids[:, 1:]  # slot 2 on: every shift has a token there
    counts = {}
    for shift in (-1, 0, 1):
        tokens = table.token_ids[:, 1 + shift : 1 + shift + drafts.shape[1]]
        settled = (drafts != UNKNOWN) & (tokens != UNKNOWN)
        equal = settled & (drafts == tokens)
        both = [np.bincount(table.answer, one.sum(axis=1)) for one in (equal, settled)]
        counts[shift] = np.array(both, np.float64)
    sums = {shift: one.sum(axis=1) for shift, one in counts.items()}
    agreement = {shift: float(equal / max(all_, 1)) for shift, (equal, all_) in sums.items()}
    best = max((-1, 1), key=lambda shift: agreement[shift])
    return Slots(agreement, best, measure_gain(counts[0], counts[best], paired=True))


def compare_groups(base: Acceptance) -> list[Group]:
    """Sets and tags against all other answers."""
    groups = []
    for parts in (base.sets, base.tags):
        for name, part in parts.items() if len(parts) > 1 else ():
            others = list(base.per_answer)
            for one in part.per_answer:
                others.remove(one)  # equal counts are interchangeable
            gain = measure_gain(count(others), count(part.per_answer), paired=False)
            groups.append(Group(name, part, gain))
    return groups

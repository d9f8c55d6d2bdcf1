"""Acceptance: what replayed answers say of a draft, in all and by set and tag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_trt.backends.base import Int64Array
from dflash_trt.replay.answer import Answer
from dflash_trt.replay.steps import UNKNOWN, StepTable
from dflash_trt.runtime.statistics import AcceptanceStatistics, RequestStatistics, total

RECALL_AT = 16
BINS = 10


@dataclass(frozen=True, slots=True)
class SlotCalibration:
    """What the draft believes of one slot, and what came of it; None where nothing was seen.

    Args:
        confidence: mean probability of the draft's token, where the slot was reached.
        accepted: share of those that were accepted.
        error: expected calibration error of the product of the probabilities up to this slot
            against "all of them were accepted", over all blocks, in 10 bins of equal width.
    """

    confidence: float | None
    accepted: float | None
    error: float | None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What the speculative loop would have accepted of known answers.

    Args:
        answers: how many.
        statistics: counts as the runtime keeps them.
        recall_at_16: per slot 1 … S-1, how often the answer's token is among the draft's 16
            likeliest where all slots before it were accepted; None where no step came so far.
        calibration: per slot.
        sets, tags: the same for each name, where answers have one.
        table: every step; sums are over these.
        per_answer: the same counts for each answer, in order.
    """

    answers: int
    statistics: AcceptanceStatistics
    recall_at_16: tuple[float | None, ...]
    calibration: tuple[SlotCalibration, ...]
    table: StepTable
    per_answer: tuple[RequestStatistics, ...]
    sets: Mapping[str, Acceptance] = field(default_factory=dict)
    tags: Mapping[str, Acceptance] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Verify steps."""
        return self.statistics.steps

    @property
    def tokens(self) -> int:
        """Tokens of the answers, the prefill's first ones among them."""
        return self.statistics.output_tokens

    @property
    def acceptance_length(self) -> float | None:
        """τ: tokens that steps emitted ÷ steps; None where there was no step with drafts."""
        return self.statistics.acceptance_length

    @property
    def conditional_acceptance(self) -> tuple[float | None, ...]:
        """Per slot 1 … S-1: accepted there, given accepted everywhere before it."""
        return self.statistics.conditional_acceptance

    def to_json(self) -> dict[str, Any]:
        """Figures without the steps."""
        own: dict[str, Any] = {
            "answers": self.answers,
            "steps": self.steps,
            "tokens": self.tokens,
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.statistics.acceptance_rate,
            "acceptance_histogram": list(self.statistics.acceptance_histogram),
            "conditional_acceptance": list(self.conditional_acceptance),
            "recall_at_16": list(self.recall_at_16),
            "calibration": [
                {"confidence": one.confidence, "accepted": one.accepted, "error": one.error}
                for one in self.calibration
            ],
        }
        for name, parts in (("sets", self.sets), ("tags", self.tags)):
            if parts:
                own[name] = {key: part.to_json() for key, part in parts.items()}
        return own


def summarise(
    answers: Sequence[Answer], per_answer: Sequence[RequestStatistics], table: StepTable
) -> Acceptance:
    """The figures of `answers`, whose counts are `per_answer`, in all and by set and tag."""

    def part(chosen: Sequence[int], **parts: Mapping[str, Acceptance]) -> Acceptance:
        counts = tuple(per_answer[index] for index in chosen)
        steps = table.pick(np.isin(table.answer, np.array(chosen, np.int64)))
        return Acceptance(
            answers=len(chosen),
            statistics=total(counts),
            recall_at_16=recall(steps),
            calibration=calibrate(steps),
            table=steps,
            per_answer=counts,
            **parts,
        )

    names = dict.fromkeys(answer.set_name for answer in answers if answer.set_name)
    tags = dict.fromkeys(tag for answer in answers for tag in answer.tags)
    sets = {
        name: part([i for i, answer in enumerate(answers) if answer.set_name == name])
        for name in names
    }
    tagged = {tag: part([i for i, one in enumerate(answers) if tag in one.tags]) for tag in tags}
    return part(range(len(answers)), sets=sets, tags=tagged)


def recall(table: StepTable, count: int = RECALL_AT) -> tuple[float | None, ...]:
    """Per slot: how often the answer's token is among the `count` likeliest, where reached."""
    hits = (table.rank < count) & (table.rank != UNKNOWN)
    return tuple(
        float(hits[reached, slot].mean()) if reached.any() else None
        for slot, reached in enumerate(table.reached.T)
    )


def calibrate(table: StepTable) -> tuple[SlotCalibration, ...]:
    """Per slot: confidence, acceptance and calibration error."""
    slots = []
    together = np.cumprod(table.probability, axis=1)
    for slot, reached in enumerate(table.reached.T):
        confidence = accepted = None
        if reached.any():
            confidence = float(table.probability[reached, slot].mean())
            accepted = float((table.accepted[reached] > slot).mean())
        # Behind an answer's end nobody knows; behind a rejection "all accepted" is known: no.
        drafted = table.draft_ids[:, slot] != UNKNOWN
        settled = drafted & ((table.known > slot) | (table.accepted < table.known))
        error = _calibration_error(together[settled, slot], table.accepted[settled] > slot)
        slots.append(SlotCalibration(confidence, accepted, error))
    return tuple(slots)


def _calibration_error(believed: Any, happened: Any) -> float | None:
    """Σ share of a bin · |mean belief - mean outcome| over bins of equal width."""
    if not len(believed):
        return None
    bins: Int64Array = np.minimum((believed * BINS).astype(np.int64), BINS - 1)
    gaps = [
        (bins == one).mean() * abs(believed[bins == one].mean() - happened[bins == one].mean())
        for one in np.unique(bins)
    ]
    return float(sum(gaps))

"""Acceptance: what replayed answers say of a draft, in all and by set and tag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.replay.answer import Answer
from dflash_trt.replay.steps import UNKNOWN, StepTable
from dflash_trt.runtime.statistics import AcceptanceStatistics, RequestStatistics, total

RECALL_AT = 16


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What the speculative loop would have accepted of known answers.

    Args:
        answers: how many.
        statistics: counts as the runtime keeps them.
        recall_at_16: per slot 1 … S-1, how often the answer's token is among the draft's 16
            likeliest where all slots before it were accepted; None where no step came so far.
        confidence: per slot, the mean probability of the draft's token, where it was reached.
        sets, tags: the same for each name, where answers have one.
        table: every step; sums are over these.
        per_answer: the same counts for each answer, in order.
    """

    answers: int
    statistics: AcceptanceStatistics
    recall_at_16: tuple[float | None, ...]
    confidence: tuple[float | None, ...]
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
            "confidence": list(self.confidence),
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
        hits = (steps.rank < RECALL_AT) & (steps.rank != UNKNOWN)
        return Acceptance(
            answers=len(chosen),
            statistics=total(counts),
            recall_at_16=_means(hits, steps),
            confidence=_means(steps.probability, steps),
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


def _means(values: npt.NDArray[Any], table: StepTable) -> tuple[float | None, ...]:
    """Per slot: the mean of `values` [N,S-1] where the slot was reached."""
    return tuple(
        float(values[reached, slot].mean()) if reached.any() else None
        for slot, reached in enumerate(table.reached.T)
    )

"""What a training measures and leaves, and who watches it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dflash_trt.core.progress import Progress
from dflash_trt.training.hours_plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A draft on held-out prompts, through the served graphs.

    Args:
        step, epoch: of training, when it was measured.
        loss: mean of the steps since the evaluation before; None before the first step.
        acceptance_length: τ, tokens a verify step.
        conditional_acceptance, recall_at_16: of slots 1 … S - 1, given all before were accepted.
        sets: τ of each set of prompts.
        candidate_recall, selector_accuracy: of DFlash 2's slots, see `Acceptance.among`.
    """

    step: int
    epoch: float
    loss: float | None
    acceptance_length: float
    conditional_acceptance: list[float | None]
    recall_at_16: list[float | None]
    sets: dict[str, float | None]
    candidate_recall: list[float | None] = field(default_factory=list)
    selector_accuracy: list[float | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrainedDraft:
    """The best draft of a training.

    Args:
        folder: its checkpoint.
        steps: what the learning rate was spread over.
        ended: why training ended, in words.
    """

    folder: Path
    evaluations: tuple[Evaluation, ...]
    steps: int
    ended: str

    @property
    def best(self) -> Evaluation:
        return best_of(self.evaluations)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPrompts:
    """Prompts that the target wrote: the set `name`.

    Args:
        left_out: how many, by why.
        second_turns: of them so many are a user's second message.
        lengths: tokens of each.
        texts: each, or its second message.
    """

    name: str
    left_out: dict[str, int]
    second_turns: int
    lengths: list[int]
    texts: list[str]


class TrainingWatch(Progress, Protocol):
    """Progress, and what is to be read later."""

    def say(self, line: str) -> None:
        """A line about what was found or decided."""

    def warn(self, line: str) -> None:
        """A line about what may be wrong."""

    def show_written(self, written: WrittenPrompts) -> None:
        """What the target asks, where it wrote prompts."""

    def show_plan(self, plan: Plan, chosen: dict[str, str]) -> None:
        """What is going to happen, before it does; which shape and settings were chosen."""

    def show_evaluation(self, evaluation: Evaluation, *, is_best: bool) -> None:
        """A measurement, as it is made."""

    def draw(self, trained: TrainedDraft) -> str | None:
        """A page (HTML) with curves; None where nothing here can draw one."""


def best_of(evaluations: Sequence[Evaluation]) -> Evaluation:
    """The one with the highest acceptance length, the first of equals."""
    return max(evaluations, key=lambda one: one.acceptance_length)

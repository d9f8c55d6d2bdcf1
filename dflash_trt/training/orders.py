"""What the first process of a training orders the others to do, when it does the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.training.trainer import StepReport, Trainer, TrainerSettings


@dataclass(frozen=True, slots=True)
class Make:
    """A trainer on the store in `store`, of the draft in `start` or a fresh one."""

    store: Path
    start: Path | None
    settings: TrainerSettings


@dataclass(frozen=True, slots=True)
class Restore:
    """Goes on from the state in `folder`."""

    folder: Path


@dataclass(frozen=True, slots=True)
class Train:
    """Trains to step `until`."""

    until: int


class LeadingTrainer(Trainer):
    """A trainer whose calls the other processes repeat."""

    def train(self, until: int, report: Callable[[StepReport], None]) -> None:
        self.crew.order(Train(until))
        super().train(until, report)

    def restore(self, folder: Path) -> bool:
        self.crew.order(Restore(folder))
        return super().restore(folder)

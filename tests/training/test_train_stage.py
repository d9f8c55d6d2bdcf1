"""When a training is measured, what is kept of it, and why it ends; its trainer only counts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dflash_trt.errors import DflashError
from dflash_trt.training.train_stage import TrainedDraft, TrainStage
from tests.training.prompts import contents

STEPS, EVERY = 40, 8


@dataclass
class CountingTrainer:
    """A trainer whose draft says how many steps it has seen."""

    interrupted_at: int | None = None
    diverges_at: int = STEPS
    losses: list[float] = field(default_factory=list)
    steps_per_epoch = 4
    settings = SimpleNamespace(steps=STEPS)
    tokens = 100

    @property
    def step(self) -> int:
        return len(self.losses)

    @property
    def is_done(self) -> bool:
        return self.step >= STEPS

    def train(self, until: int, on_step: Callable[[], None]) -> None:
        while self.step < min(until, STEPS):
            if self.step == self.interrupted_at:
                raise KeyboardInterrupt
            if self.step >= self.diverges_at:
                raise DflashError(f"the loss is {math.nan} at step {self.step}", where="training")
            self.losses.append(5 - self.step / 20)

    def save(self, folder: Path) -> None:
        (folder / "state.json").write_text(json.dumps(self.losses))

    def restore(self, folder: Path) -> None:
        if (folder / "state.json").exists():
            self.losses = json.loads((folder / "state.json").read_text())

    def export(self, folder: Path) -> None:
        (folder / "draft").write_text(str(self.step))


def train(
    folder: Path, taus: Sequence[float], trainer: CountingTrainer | None = None, **options: Any
) -> TrainedDraft:
    """A training whose evaluation at step s finds the acceptance length `taus[s // EVERY]`."""

    def measure(draft: Path) -> Any:
        return SimpleNamespace(
            acceptance_length=taus[int((draft / "draft").read_text()) // EVERY],
            conditional_acceptance=(0.5, None),
            recall_at_16=(1.0, None),
            sets={},
            tags={},
        )

    folder.mkdir(exist_ok=True)
    counting: Any = trainer or CountingTrainer()
    usual: dict[str, Any] = {"has_time": lambda: True, "is_fixed": False, "measures_start": False}
    given = {"evaluation_steps": EVERY, **usual, **options}
    return TrainStage(folder, counting, measure, mock.MagicMock(), **given).run()


def test_the_best_is_kept_and_the_others_go(tmp_path: Path) -> None:
    trained = train(tmp_path, [0, 1.5, 3, 2, 3, 2.5])
    assert trained.best.step == 16 and (trained.folder / "draft").read_text() == "16"
    assert [path.name for path in trained.folder.parent.iterdir()] == ["step-0000016"]
    assert trained.ended == "the schedule's last step"
    first, second = trained.evaluations[:2]
    assert first.loss == pytest.approx(5 - 3.5 / 20)
    assert second.loss == pytest.approx(5 - 11.5 / 20)
    assert (first.epoch, second.epoch) == (2, 4)
    continued = train(tmp_path / "b", [4, 2, 3, 3, 3, 3], measures_start=True)
    assert continued.best.step == 0 and continued.evaluations[0].loss is None


def test_it_ends_when_acceptance_has_stopped_rising(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("dflash_trt.training.train_stage.PATIENCE", 2)
    taus = [0, 2, 1.9, 2, 3, 4]
    trained = train(tmp_path / "a", taus)
    assert trained.best.step == 8 and trained.evaluations[-1].step == 24
    assert trained.ended == "acceptance has not risen in 2 evaluations"
    fixed = train(tmp_path / "b", taus, is_fixed=True, has_time=lambda: False)
    assert (fixed.best.step, fixed.ended) == (40, "the schedule's last step")


def test_it_ends_when_the_hours_are_over_or_the_loss_is_no_number(tmp_path: Path) -> None:
    taus, trainer = [0, 1, 2, 3, 4, 5], CountingTrainer()
    trained = train(tmp_path, taus, trainer, has_time=lambda: trainer.step < 20)
    assert trained.ended == "the hours were over at step 24 of 40" and trained.best.step == 24
    # Not even one evaluation was due: the draft is measured where it is.
    late = train(tmp_path / "late", taus, evaluation_steps=STEPS, has_time=lambda: False)
    assert late.best.step == 20 and late.ended == "the hours were over at step 20 of 40"
    diverged = train(tmp_path / "nan", taus, CountingTrainer(diverges_at=21))
    assert diverged.best.step == 16
    assert diverged.ended == "the loss is nan at step 21: the best before it is kept"
    with pytest.raises(DflashError, match="the loss is nan at step 0"):
        train(tmp_path / "none", taus, CountingTrainer(diverges_at=0))


def test_a_killed_training_ends_as_one_that_was_not(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("dflash_trt.training.train_stage._CHECKPOINT_S", -1.0)
    monkeypatch.setattr("dflash_trt.training.train_stage._CHUNK_STEPS", 3)
    taus = [0, 2, 1, 3, 2.5, 2]
    whole = train(tmp_path / "whole", taus)
    for moment in (1, 9, 17, 38):
        folder = tmp_path / f"killed-at-{moment}"
        with pytest.raises(KeyboardInterrupt):
            train(folder, taus, CountingTrainer(interrupted_at=moment))
        killed = train(folder, taus)
        assert killed.evaluations == whole.evaluations, moment
        assert contents(folder) == contents(tmp_path / "whole"), moment

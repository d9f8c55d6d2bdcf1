"""When a training is measured, what is kept of it, and why it ends; its trainer only counts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dflash_trt.core.progress import SilentProgress
from dflash_trt.decoding.replay import Acceptance
from dflash_trt.errors import DflashError
from dflash_trt.training.hours_plan import Plan
from dflash_trt.training.observer import Evaluation, TrainingCurves
from dflash_trt.training.train_stage import TrainedDraft, TrainStage
from dflash_trt.training.trainer import Trainer
from tests.training.prompts import contents

STEPS = 40


@dataclass
class CountingTrainer:
    """A trainer whose draft says how many steps it has seen."""

    loss: Callable[[int], float] = lambda step: 5 - step / 20
    interrupted_at: int | None = None
    losses: list[float] = field(default_factory=list)
    steps_per_epoch = 4
    settings = SimpleNamespace(steps=STEPS)

    @property
    def step(self) -> int:
        return len(self.losses)

    @property
    def is_done(self) -> bool:
        return self.step >= STEPS

    @property
    def tokens(self) -> int:
        return 100 * self.step

    def train(self, until: int, on_step: Callable[[], None]) -> None:
        while self.step < min(until, STEPS):
            if self.step == self.interrupted_at:
                raise KeyboardInterrupt
            loss = self.loss(self.step)
            if not math.isfinite(loss):
                raise DflashError(f"the loss is {loss} at step {self.step}", where="training")
            self.losses.append(loss)
            on_step()

    def save(self, folder: Path) -> None:
        (folder / "state.json").write_text(json.dumps(self.losses))

    def restore(self, folder: Path) -> bool:
        if (folder / "state.json").exists():
            self.losses = json.loads((folder / "state.json").read_text())
        return self.step > 0

    def export(self, folder: Path) -> None:
        (folder / "draft").write_text(str(self.step))


class Watch(SilentProgress):
    """Notes what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    warn = say

    def show_plan(self, plan: Plan, chosen: dict[str, str]) -> None:
        raise AssertionError("a stage has no plan")

    def show_evaluation(self, evaluation: Evaluation, *, is_best: bool) -> None:
        self.lines.append(f"{evaluation.step} {evaluation.acceptance_length} {is_best}")

    def draw(self, curves: TrainingCurves) -> str:
        raise AssertionError("a stage draws nothing")


def train(
    folder: Path,
    taus: Sequence[float],
    trainer: CountingTrainer | None = None,
    *,
    every: int = 8,
    is_fixed: bool = False,
    has_time: Callable[[], bool] = lambda: True,
    measures_start: bool = False,
    watch: Watch | None = None,
) -> TrainedDraft:
    """A training whose evaluation at step s finds the acceptance length `taus[s // every]`."""

    def measure(draft: Path) -> Acceptance:
        tau = taus[int((draft / "draft").read_text()) // every]
        figures = SimpleNamespace(
            acceptance_length=tau,
            conditional_acceptance=(tau / 8, None),
            recall_at_16=(1.0, None),
            sets={},
            tags={},
        )
        return cast(Acceptance, figures)

    folder.mkdir(exist_ok=True)
    counting: Any = trainer or CountingTrainer()
    return TrainStage(
        folder,
        cast(Trainer, counting),
        measure,
        watch or Watch(),
        evaluation_steps=every,
        has_time=has_time,
        is_fixed=is_fixed,
        measures_start=measures_start,
    ).run()


def test_the_best_is_kept_and_the_others_go(tmp_path: Path) -> None:
    watch = Watch()
    trained = train(tmp_path, [0, 1.5, 3, 2, 3, 2.5], watch=watch)
    said = ["8 1.5 True", "16 3 True", "24 2 False", "32 3 False", "40 2.5 False"]
    assert watch.lines == said
    assert trained.best.step == 16 and (trained.folder / "draft").read_text() == "16"
    assert [path.name for path in trained.folder.parent.iterdir()] == ["step-0000016"]
    assert trained.ended == "the schedule's last step"
    first, second = trained.evaluations[:2]
    assert first.loss == pytest.approx(5 - 3.5 / 20)
    assert second.loss == pytest.approx(5 - 11.5 / 20)
    assert (first.epoch, second.epoch) == (2, 4)


def test_it_ends_when_acceptance_has_stopped_rising(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("dflash_trt.training.train_stage.PATIENCE", 2)
    taus = [0, 2, 1.9, 2, 3, 4]
    trained = train(tmp_path / "a", taus)
    assert trained.best.step == 8 and trained.evaluations[-1].step == 24
    assert trained.ended == "acceptance has not risen in 2 evaluations"
    fixed = train(tmp_path / "b", taus, is_fixed=True, has_time=lambda: False)
    assert (fixed.best.step, fixed.ended) == (40, "the schedule's last step")


def test_a_draft_that_is_continued_may_stay_the_best(tmp_path: Path) -> None:
    trained = train(tmp_path, [4, 2, 3, 3, 3, 3], measures_start=True)
    assert trained.best.step == 0 and trained.evaluations[0].loss is None


def test_it_ends_when_the_hours_are_over(tmp_path: Path) -> None:
    trainer = CountingTrainer()
    trained = train(tmp_path, [0, 1, 2, 3, 4, 5], trainer, has_time=lambda: trainer.step < 20)
    assert trained.ended == "the hours were over at step 24 of 40"
    assert trained.best.step == 24
    # Not even one evaluation was due: the draft is measured where it is.
    late = train(tmp_path / "late", [1.0] * 6, every=40, has_time=lambda: False)
    assert late.best.step == 20 and late.ended == "the hours were over at step 20 of 40"


def test_a_loss_that_is_no_number_ends_it(tmp_path: Path) -> None:
    trainer = CountingTrainer(lambda step: math.nan if step > 20 else 1.0)
    trained = train(tmp_path, [0, 1, 2, 3, 4, 5], trainer)
    assert trained.best.step == 16
    assert trained.ended == "the loss is nan at step 21: the best before it is kept"


def test_a_killed_training_ends_as_one_that_was_not(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("dflash_trt.training.train_stage._CHECKPOINT_S", -1.0)
    monkeypatch.setattr("dflash_trt.training.train_stage._CHUNK_STEPS", 3)
    taus = [0, 2, 1, 3, 2.5, 2]
    whole = train(tmp_path / "whole", taus)
    for moment in (1, 9, 17, 25, 38):
        folder = tmp_path / f"killed-at-{moment}"
        with pytest.raises(KeyboardInterrupt):
            train(folder, taus, CountingTrainer(interrupted_at=moment))
        killed = train(folder, taus)
        assert killed.evaluations == whole.evaluations, moment
        assert contents(folder) == contents(tmp_path / "whole"), moment

"""Training to its last step, measured on the way through the served graphs; the best is kept.

Everything but the moment of a checkpoint depends on steps alone, so that a run that was killed
and one that was not end with the same bytes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from dflash_trt.decoding.replay import Acceptance
from dflash_trt.errors import DflashError
from dflash_trt.training.observer import Evaluation, TrainedDraft, TrainingWatch, best_of
from dflash_trt.training.trainer import Trainer
from dflash_trt.training.work_folder import JsonLines

_EVALUATIONS = "epochs.jsonl"
PATIENCE = 5
"""Evaluations without a new best after which training ends: fewer are noise."""
# Seconds between checkpoints: what a kill costs.
_CHECKPOINT_S = 20.0
_CHUNK_STEPS = 20

Measure = Callable[[Path], Acceptance]
"""A draft's checkpoint to its acceptance on held-out prompts."""


class TrainStage:
    """Trains in `folder`, or goes on where a killed run was.

    Args:
        evaluation_steps: after so many steps the draft is measured, and after the last one.
        has_time: whether the hours last.
        is_fixed: whether all steps are trained, whatever the time and the measurements say.
        measures_start: whether the draft as it begins is measured, and may stay the best.
    """

    def __init__(
        self,
        folder: Path,
        trainer: Trainer,
        measure: Measure,
        watch: TrainingWatch,
        *,
        evaluation_steps: int,
        has_time: Callable[[], bool],
        is_fixed: bool,
        measures_start: bool,
    ) -> None:
        self._folder, self._trainer, self._measure, self._watch = folder, trainer, measure, watch
        self._every, self._measures_start = evaluation_steps, measures_start
        self._is_fixed, self._has_time = is_fixed, has_time
        self._lines = JsonLines(folder / _EVALUATIONS)
        self._evaluations = [Evaluation(**record) for record in self._lines.records]
        self._saved = time.monotonic()

    def run(self) -> TrainedDraft:
        """Trains; returns the best draft.

        Raises:
            DflashError: the loss diverged before anything was measured.
        """
        with self._lines:
            self._trainer.restore(self._folder)
            self._begin_bar()
            while True:
                if self._is_due():
                    self._evaluate()
                    self._save()
                if (ended := self._ended()) is not None:
                    break
                try:
                    self._train_on()
                except DflashError as error:
                    if not self._evaluations:
                        raise
                    ended = f"{error.what}: the best before it is kept"
                    self._watch.warn(ended)
                    break
        steps = self._trainer.settings.steps
        return TrainedDraft(self._best_folder, tuple(self._evaluations), steps, ended)

    @property
    def _best_folder(self) -> Path:
        return self._draft_folder(best_of(self._evaluations).step)

    def _ended(self) -> str | None:
        """Why training is over; None while it is not."""
        trainer, evaluations = self._trainer, self._evaluations
        if trainer.is_done:
            return "the schedule's last step"
        if not evaluations:
            return None
        stale = len(evaluations) - 1 - evaluations.index(best_of(evaluations))
        if stale >= PATIENCE and evaluations[-1].step == trainer.step and not self._is_fixed:
            return f"acceptance has not risen in {stale} evaluations"
        if not self._is_fixed and not self._has_time():
            return f"the hours were over at step {trainer.step} of {trainer.settings.steps}"
        return None

    def _is_due(self) -> bool:
        step = self._trainer.step
        if any(one.step == step for one in self._evaluations):
            return False
        if step == 0:
            return self._measures_start
        is_last = self._trainer.is_done or (
            not (self._evaluations or self._is_fixed or self._has_time())
        )
        return is_last or step % self._every == 0

    def _train_on(self) -> None:
        step = self._trainer.step
        boundary = (step // self._every + 1) * self._every
        self._trainer.train(min(boundary, step + _CHUNK_STEPS), lambda: self._watch.advance(1))
        if time.monotonic() - self._saved > _CHECKPOINT_S:
            self._save()

    def _evaluate(self) -> None:
        trainer = self._trainer
        folder = self._draft_folder(trainer.step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        trainer.export(folder)
        acceptance = self._measure(folder)
        before = self._evaluations[-1].step if self._evaluations else 0
        losses = trainer.losses[before : trainer.step]
        sizes = trainer.model.shape.dflash2
        recall, accuracy = ((), ()) if sizes is None else acceptance.among(sizes.top_k)
        evaluation = Evaluation(
            step=trainer.step,
            epoch=trainer.step / trainer.steps_per_epoch,
            loss=sum(losses) / len(losses) if losses else None,
            acceptance_length=acceptance.acceptance_length or 1.0,
            conditional_acceptance=list(acceptance.conditional_acceptance),
            recall_at_16=list(acceptance.recall_at_16),
            sets={name: one.acceptance_length for name, one in acceptance.sets.items()},
            candidate_recall=list(recall),
            selector_accuracy=list(accuracy),
        )
        self._evaluations.append(evaluation)
        self._lines.append(asdict(evaluation))
        self._lines.sync()
        for other in folder.parent.iterdir():  # only once it is noted which is the best
            if other != self._best_folder:
                shutil.rmtree(other, ignore_errors=True)
        self._watch.show_evaluation(evaluation, is_best=self._best_folder == folder)
        self._begin_bar()

    def _draft_folder(self, step: int) -> Path:
        return self._folder / "drafts" / f"step-{step:07}"

    def _begin_bar(self) -> None:
        step, steps = self._trainer.step, self._trainer.settings.steps
        if step < steps:
            self._watch.stage(f"training, {step:,} of {steps:,} steps", steps - step, "steps")

    def _save(self) -> None:
        self._trainer.save(self._folder)
        self._saved = time.monotonic()

"""Training to the schedule's end, measured on the way through the served graphs; the best is kept.

Everything but the moment of a checkpoint depends on steps alone, so that a run that was killed
and one that was not end with the same bytes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.core.publish import replace_file
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.errors import DflashError
from dflash_trt.replay import Acceptance
from dflash_trt.training.json_lines import JsonLines
from dflash_trt.training.plan import Schedule
from dflash_trt.training.trainer import StepReport, Trainer
from dflash_trt.training.watch import Evaluation, TrainingCurves, TrainingWatch, best_of
from dflash_trt.training.work_folder import write_json

CURVES_NAME = "curves.html"
_EVALUATIONS, _LOSSES = "epochs.jsonl", "losses.json"
# Seconds between checkpoints: what a kill costs.
_CHECKPOINT_S = 20.0
_CHUNK_STEPS = 20
# A mean loss of so many steps that is so much above the lowest one has left the road.
_SMOOTH_STEPS = 25
_DIVERGED = 1.5

Measure = Callable[[Path], Acceptance]
"""A draft's checkpoint to its acceptance on held-out prompts."""


@dataclass(frozen=True, slots=True)
class TrainedDraft:
    """The best draft of a training.

    Args:
        folder: its checkpoint.
        schedule_steps: what the learning rate was spread over.
        ended: why training ended, in words.
    """

    folder: Path
    best: Evaluation
    evaluations: tuple[Evaluation, ...]
    schedule_steps: int
    ended: str


class TrainStage:
    """Trains in `folder`, or goes on where a killed run was.

    Args:
        patience: evaluations without a new best after which training stops.
        has_time: whether the hours last.
        tick: is called now and then, to note the time.
        measures_start: whether the draft as it begins is measured, and may stay the best.
    """

    def __init__(
        self,
        folder: Path,
        trainer: Trainer,
        schedule: Schedule,
        measure: Measure,
        watch: TrainingWatch,
        *,
        patience: int,
        has_time: Callable[[], bool],
        tick: Callable[[], None],
        measures_start: bool,
    ) -> None:
        self._folder, self._trainer, self._schedule = folder, trainer, schedule
        self._measure, self._watch, self._patience = measure, watch, patience
        self._has_time, self._tick = has_time, tick
        self._measures_start = measures_start
        self._losses: list[float] = []
        self._told = False
        self._saved = time.monotonic()

    def run(self) -> TrainedDraft:
        """Trains; returns the best draft.

        Raises:
            DflashError: the loss diverged before anything was measured.
        """
        with JsonLines(self._folder / _EVALUATIONS) as lines:
            self._restore()
            evaluations = [read_evaluation(record) for record in lines.records]
            self._begin_bar()
            while True:
                if self._is_due(evaluations):
                    evaluations.append(self._evaluate(lines, evaluations))
                    self._save()
                ended = self._ended(evaluations)
                if ended is not None:
                    break
                try:
                    self._train_on()
                except DflashError as error:
                    if not evaluations:
                        raise
                    ended = f"{error.what}: the best before it is kept"
                    self._watch.warn(ended)
                    break
        best = best_of(evaluations)
        assert best is not None
        return TrainedDraft(
            folder=self._draft_folder(best.step),
            best=best,
            evaluations=tuple(evaluations),
            schedule_steps=self._schedule.steps,
            ended=ended,
        )

    def _ended(self, evaluations: list[Evaluation]) -> str | None:
        """Why training is over; None while it is not."""
        trainer = self._trainer
        if trainer.is_done:
            return "the schedule's last step"
        if not evaluations:
            return None
        best = best_of(evaluations)
        stale = len(evaluations) - 1 - evaluations.index(best) if best is not None else 0
        if evaluations[-1].step == trainer.step and stale >= self._patience:
            return f"acceptance has not risen in {stale} evaluations"
        if not self._has_time():
            return f"the hours were over at step {trainer.step} of {self._schedule.steps}"
        return None

    def _is_due(self, evaluations: list[Evaluation]) -> bool:
        step = self._trainer.step
        if any(one.step == step for one in evaluations):
            return False
        if step == 0:
            return self._measures_start
        is_last = self._trainer.is_done or (not evaluations and not self._has_time())
        return is_last or step % self._schedule.evaluation_steps == 0

    def _train_on(self) -> None:
        every = self._schedule.evaluation_steps
        step = self._trainer.step
        boundary = (step // every + 1) * every
        self._trainer.train(min(boundary, step + _CHUNK_STEPS), self._note)
        self._check_loss()
        if time.monotonic() - self._saved > _CHECKPOINT_S:
            self._save()

    def _note(self, report: StepReport) -> None:
        self._losses.append(report.loss)
        self._watch.advance(1)

    def _check_loss(self) -> None:
        losses = self._losses
        if len(losses) < 4 * _SMOOTH_STEPS:
            return
        blocks = [
            sum(losses[i : i + _SMOOTH_STEPS]) / _SMOOTH_STEPS
            for i in range(0, len(losses) - _SMOOTH_STEPS + 1, _SMOOTH_STEPS)
        ]
        lowest, last = min(blocks), blocks[-1]
        if last > _DIVERGED * lowest:
            step = self._trainer.step
            what = f"training diverged at step {step}: a loss of {last:.2f} after {lowest:.2f}"
            raise DflashError(what, fix="lower --learning-rate")

    def _evaluate(self, lines: JsonLines, evaluations: list[Evaluation]) -> Evaluation:
        step = self._trainer.step
        folder = self._draft_folder(step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._trainer.export(folder)
        acceptance = self._measure(folder)
        before = evaluations[-1].step if evaluations else 0
        some = self._losses[before:step]
        evaluation = Evaluation(
            step=step,
            epoch=step / self._schedule.steps_per_epoch,
            loss=sum(some) / len(some) if some else None,
            acceptance_length=acceptance.acceptance_length or 1.0,
            conditional_acceptance=acceptance.conditional_acceptance,
            recall_at_16=acceptance.recall_at_16,
            sets={name: one.acceptance_length for name, one in acceptance.sets.items()},
            categories={name: one.acceptance_length for name, one in acceptance.tags.items()},
            tokens=self._trainer.tokens,
        )
        best = best_of([*evaluations, evaluation])
        assert best is not None
        lines.append(evaluation.to_json())
        lines.sync()
        for other in folder.parent.iterdir():  # only once it is noted which is the best
            if other != self._draft_folder(best.step):
                shutil.rmtree(other, ignore_errors=True)
        self._watch.show_evaluation(evaluation, is_best=best is evaluation)
        self._draw([*evaluations, evaluation])
        self._begin_bar()
        return evaluation

    def _draw(self, evaluations: list[Evaluation]) -> None:
        """Renews the page by which a training is watched, and says once where it is."""
        page = self._watch.draw(TrainingCurves(evaluations, self._schedule.steps))
        if page is None:
            return
        path = self._folder / CURVES_NAME
        replace_file(path, page.encode())  # a browser that watches never reads half of it
        if not self._told:
            self._watch.say(f"curves: {path}")
        self._told = True

    def _draft_folder(self, step: int) -> Path:
        return self._folder / "drafts" / f"step-{step:07}"

    def _begin_bar(self) -> None:
        left = self._schedule.steps - self._trainer.step
        if left:
            done = f"training, {self._trainer.step:,} of {self._schedule.steps:,} steps"
            self._watch.stage(done, left, "steps")

    def _save(self) -> None:
        # The losses first: what is there of steps that the state does not have is ignored.
        write_json(self._folder / _LOSSES, {"losses": self._losses})
        self._trainer.save(self._folder)
        self._tick()
        self._saved = time.monotonic()

    def _restore(self) -> None:
        if self._trainer.restore(self._folder):
            losses = read_json_object(self._folder / _LOSSES)["losses"]
            self._losses = [float(one) for one in losses][: self._trainer.step]


def read_evaluation(record: dict[str, object]) -> Evaluation:
    """An evaluation as `to_json` wrote it."""
    values = {
        key: tuple(value) if isinstance(value, list) else value for key, value in record.items()
    }
    return Evaluation(**values)  # type: ignore[arg-type]

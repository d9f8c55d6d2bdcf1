"""From answers to the best draft: features of every row, a schedule, and measured training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.replay import Acceptance, Answer, Replay
from dflash_trt.training.capture import Features, OnlineFeatures, TokenRow, capture, layout
from dflash_trt.training.feature_store import FeatureStore, open_store
from dflash_trt.training.plan import (
    RESERVE_SHARE,
    Rates,
    Schedule,
    make_schedule,
    replay_seconds,
)
from dflash_trt.training.preparation import Preparation
from dflash_trt.training.teacher import Source, open_features
from dflash_trt.training.train_stage import TrainedDraft, TrainStage
from dflash_trt.training.trainer import Trainer
from dflash_trt.training.trainer_setup import make_trainer
from dflash_trt.training.watch import TrainingWatch
from dflash_trt.training.work_folder import StageFolder, WorkFolder, digest, write_json

_SCHEDULE = "schedule.json"
_OVERTIME = 1.08
"""Of the hours: training ends here even if its schedule does not."""

BuildPair = Callable[[Path, Path], Bundle]
"""A draft's checkpoint and a destination to the pair's bundle there."""


class Learner:
    """The stages of features and of training.

    Args:
        bundle: of the target, whose graphs may compute the features.
        build: makes bundles of the target with a draft, over what is there.
        source: who computes the features.
    """

    def __init__(
        self,
        preparation: Preparation,
        work: WorkFolder,
        watch: TrainingWatch,
        bundle: Bundle,
        build: BuildPair,
        source: Source,
    ) -> None:
        self._preparation, self._work, self._watch = preparation, work, watch
        self._bundle, self._build, self._source = bundle, build, source
        self._request = preparation.request

    def learn(
        self, train: Sequence[TokenRow], held_out: Sequence[Answer], rates: Rates
    ) -> TrainedDraft:
        """The best draft of a training on `train`, measured on `held_out`.

        Raises:
            DflashError: a disk that is too small, features that are not finite, a divergence.
        """
        answers = digest({"rows": [[list(row.prompt_ids), list(row.answer_ids)] for row in train]})
        taps = self._preparation.chosen.shape.target_layer_ids
        parts = {
            **self._preparation.target_parts(),
            "taps": taps,
            "rows": answers,
            "source": self._source,
        }
        with ExitStack() as stack:
            if self._request.online:
                compute = stack.enter_context(self._open_features())
                store = _online_store(train, self._preparation.width, compute)
            else:
                store = self._capture(train, parts)
            stage = self._work.stage("train", {**parts, **self._train_parts(held_out)})
            schedule = self._schedule(stage, rates, len(train), len(held_out))
            is_fixed = self._request.recipe.steps is not None
            measured = replay_seconds(rates, len(held_out))
            limit = _OVERTIME * self._request.hours * 3600 - measured
            return TrainStage(
                stage.folder,
                self._trainer(store, schedule.steps),
                schedule,
                lambda draft: self._measure(draft, held_out, stage.folder),
                self._watch,
                patience=self._request.recipe.patience,
                has_time=lambda: is_fixed or self._work.spent < limit,
                tick=self._work.tick,
                measures_start=self._request.start is not None,
            ).run()

    def _train_parts(self, held_out: Sequence[Answer]) -> dict[str, Any]:
        """What the draft depends on, beside the features."""
        preparation, request = self._preparation, self._request
        return {
            **preparation.start_parts(),
            "settings": asdict(preparation.recipe.settings),
            "steps": request.recipe.steps,
            "patience": request.recipe.patience,
            "threads": request.threads,
            "device": preparation.device,
            "held_out": [[list(one.prompt_ids), list(one.token_ids)] for one in held_out],
        }

    def _trainer(self, store: FeatureStore, steps: int) -> Trainer:
        preparation = self._preparation
        return make_trainer(
            preparation.target.spec,
            preparation.chosen.shape,
            self._request.start,
            store,
            replace(preparation.recipe.settings, steps=steps),
            preparation.device,
            self._request.threads,
        )

    def _measure(self, draft: Path, held_out: Sequence[Answer], folder: Path) -> Acceptance:
        bundle = self._build(draft, folder / "bundle")
        with Replay(bundle, threads=self._request.threads) as replay:
            return replay.measure(held_out, self._watch)

    def _open_features(self) -> AbstractContextManager[Features]:
        return open_features(self._source, self._preparation, self._bundle)

    def _capture(self, train: Sequence[TokenRow], parts: dict[str, Any]) -> FeatureStore:
        stage = self._work.stage("features", parts)
        if stage.record is None:
            tokens = sum(len(row.token_ids) for row in train)
            self._watch.stage("capturing features", tokens, "tokens")
            with self._open_features() as compute:
                width, advance = self._preparation.width, self._watch.advance
                capture(train, width, compute, stage.folder, advance)
            stage.finish({"rows": len(train), "tokens": tokens})
            self._work.tick()
        return open_store(stage.folder)

    def _schedule(self, stage: StageFolder, rates: Rates, rows: int, held_out: int) -> Schedule:
        """Chosen when training begins, and the same ever after."""
        path = stage.folder / _SCHEDULE
        if not path.is_file():
            budget, measured = self._request.hours * 3600, replay_seconds(rates, held_out)
            left = (1 - RESERVE_SHARE) * budget - self._work.spent - 2 * measured
            batch_rows = self._preparation.recipe.settings.rows
            steps = self._request.recipe.steps
            schedule = make_schedule(rates, left, rows, batch_rows, measured, steps)
            write_json(path, asdict(schedule))
        return Schedule(**read_json_object(path))


def _online_store(train: Sequence[TokenRow], width: int, compute: Features) -> FeatureStore:
    tokens, table = layout(train)
    features: Any = OnlineFeatures(train, width, compute)
    return FeatureStore(tokens, table, features)

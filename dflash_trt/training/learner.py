"""From answers to the best draft: features of every row, and measured training."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.decoding.replay import Acceptance, Answer, Replay
from dflash_trt.training.features import (
    FeatureStore,
    TokenRow,
    capture,
    online_store,
    open_store,
)
from dflash_trt.training.hours_plan import Plan
from dflash_trt.training.observer import TrainingWatch
from dflash_trt.training.pair_bundle import PairBuilder
from dflash_trt.training.preparation import Preparation
from dflash_trt.training.target_head import load_ends
from dflash_trt.training.teacher import Source, open_features
from dflash_trt.training.train_stage import TrainedDraft, TrainStage
from dflash_trt.training.trainer import Trainer, start_draft
from dflash_trt.training.work_folder import WorkFolder, digest

_WARM_STEPS, _TIMED_STEPS = 2, 8
_MEASURED_TOKENS = 4096


class Learner:
    """The stages of features and of training.

    Args:
        bundle: of the target, whose graphs may compute the features.
        builder: makes bundles of the target with a draft.
        source: who computes the features.
    """

    def __init__(
        self,
        preparation: Preparation,
        work: WorkFolder,
        watch: TrainingWatch,
        bundle: Bundle,
        builder: PairBuilder,
        source: Source,
    ) -> None:
        self._preparation, self._work, self._watch = preparation, work, watch
        self._bundle, self._builder, self._source = bundle, builder, source
        self._request = preparation.request

    def measure(self, rows: Sequence[TokenRow]) -> tuple[float, float]:
        """The seconds that the features of one of `rows` take, and a training step."""
        ends = accumulate(len(row.token_ids) for row in rows)
        least = self._preparation.recipe.settings.rows
        count = next((n for n, end in enumerate(ends, 1) if end >= _MEASURED_TOKENS), len(rows))
        some = rows[: max(count, least)]
        with tempfile.TemporaryDirectory(prefix="measured-", dir=self._work.root) as name:
            with open_features(self._source, self._preparation, self._bundle) as compute:
                compute(some[0].token_ids)  # what a first call takes, it takes once
                started = time.perf_counter()
                store = capture(some, self._preparation.width, compute, Path(name))
                features_s = (time.perf_counter() - started) / len(some)
            trainer = self._trainer(store, _WARM_STEPS + _TIMED_STEPS)
            trainer.train(_WARM_STEPS)
            started = time.perf_counter()
            trainer.train(_WARM_STEPS + _TIMED_STEPS)
        return features_s, (time.perf_counter() - started) / _TIMED_STEPS

    def learn(
        self,
        train: Sequence[TokenRow],
        held_out: Sequence[Answer],
        plan: Plan,
        has_time: Callable[[], bool],
    ) -> TrainedDraft:
        """The best draft of a training on `train`, measured on `held_out`.

        Raises:
            DflashError: a disk that is too small, features that are not finite, a divergence.
        """
        parts: dict[str, Any] = {
            **self._preparation.target_parts(),
            "taps": self._preparation.chosen.shape.target_layer_ids,
            "rows": digest({"rows": [[*row.prompt_ids, -1, *row.answer_ids] for row in train]}),
            "source": self._source,
        }
        with self._open_store(train, parts) as store:
            trainer = self._trainer(store, plan.steps)
            parts |= self._preparation.training_parts() | {
                "steps": [plan.steps, plan.evaluation_steps],
                "held_out": [[*one.prompt_ids, -1, *map(int, one.token_ids)] for one in held_out],
            }
            folder = self._work.stage("train", parts).folder
            return TrainStage(
                folder,
                trainer,
                lambda draft: self._replay(draft, held_out, folder),
                self._watch,
                evaluation_steps=plan.evaluation_steps,
                has_time=has_time,
                is_fixed=self._request.recipe.steps is not None,
                measures_start=self._request.start is not None,
            ).run()

    def _replay(self, draft: Path, held_out: Sequence[Answer], folder: Path) -> Acceptance:
        bundle = self._builder.build(draft, folder / "bundle")
        with Replay(bundle, threads=self._request.threads) as replay:
            return replay.measure(held_out, self._watch)

    @contextmanager
    def _open_store(
        self, train: Sequence[TokenRow], parts: dict[str, Any]
    ) -> Iterator[FeatureStore]:
        """The features of `train`: computed as they are used, or captured unless they are there."""
        stage = None if self._request.online else self._work.stage("features", parts)
        if stage is not None and stage.record is not None:
            yield open_store(stage.folder)
            return
        with open_features(self._source, self._preparation, self._bundle) as compute:
            if stage is None:
                yield online_store(train, compute)
                return
            tokens = sum(len(row.token_ids) for row in train)
            self._watch.stage("capturing features", tokens, "tokens")
            store = capture(
                train, self._preparation.width, compute, stage.folder, self._watch.advance
            )
        stage.finish({"rows": len(train), "tokens": tokens})
        yield store

    def _trainer(self, store: FeatureStore, steps: int) -> Trainer:
        """A trainer at step 0, on its device."""
        preparation, request = self._preparation, self._request
        torch.set_num_threads(request.threads)
        settings = replace(preparation.recipe.settings, steps=steps)
        model = start_draft(preparation.chosen.shape, request.start, settings.seed)
        ends = load_ends(preparation.target.spec)
        return Trainer(model.to(preparation.device), ends, store, settings)

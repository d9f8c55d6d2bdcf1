"""`train-draft`: from a target and prompts to a proven pair, stage by stage.

prompts, where the target writes them → answers → features → training, measured by replay → build
and proof. What a stage has finished, and what an unfinished one has written, the next run of the
same command goes on with.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from dflash_trt.core.strict_json import read_json_object
from dflash_trt.decoding.replay import Acceptance, Answer, Replay
from dflash_trt.training.answers import AnswerStage, open_target
from dflash_trt.training.features import (
    Features,
    FeatureStore,
    Teacher,
    TokenRow,
    capture,
    check_space,
    online_store,
    open_store,
    uses_teacher,
)
from dflash_trt.training.finish import TrainedPair, finish
from dflash_trt.training.hours_plan import ANSWER_SHARE, Plan, Rates, check_hours, make_plan
from dflash_trt.training.observer import TrainedDraft, TrainingWatch
from dflash_trt.training.pair_bundle import PairBuilder
from dflash_trt.training.preparation import Preparation, check_outputs, prepare
from dflash_trt.training.prompt_sets import TrainingSet
from dflash_trt.training.recipe import describe
from dflash_trt.training.rows import PromptRow, RenderedRows, render_rows
from dflash_trt.training.self_prompts import PromptWriter
from dflash_trt.training.target import load_ends
from dflash_trt.training.train_stage import TrainStage
from dflash_trt.training.trainer import Trainer, start_draft
from dflash_trt.training.training_request import TrainRequest
from dflash_trt.training.work_folder import (
    JsonLines,
    WorkFolder,
    digest,
    open_work,
    write_json,
)

_PLAN = "plan.json"
_ANSWERS_END, _TRAINING_ENDS = ANSWER_SHARE + 0.10, 0.95
"""Shares of the hours after which a stage ends, even if it has not come as far as planned."""
_WARM_STEPS, _TIMED_STEPS = 2, 8
_MEASURED_TOKENS = 4096


def train_draft(
    request: TrainRequest, watch: TrainingWatch, *, only_plan: bool = False
) -> TrainedPair | None:
    """Trains a draft and builds its pair; with `only_plan` shows the plan and returns None.

    Raises:
        DflashError: whatever cannot be done; what was finished stays in the work folder.
    """
    watch.stage("reading prompts and target", None)
    preparation = prepare(request)
    torch.set_num_threads(request.threads)
    with open_work(preparation.work) as work:
        check_outputs(preparation)
        return _Run(preparation, work, watch).run(only_plan=only_plan)


class _Run:
    """One run over a work folder."""

    def __init__(self, preparation: Preparation, work: WorkFolder, watch: TrainingWatch) -> None:
        self._preparation, self._work, self._watch = preparation, work, watch
        self._request, self._shape = preparation.request, preparation.shape
        self._started = time.monotonic()
        self._written_s = 0.0
        self._parts = preparation.training_parts()

    def run(self, *, only_plan: bool) -> TrainedPair | None:
        preparation, watch = self._preparation, self._watch
        if preparation.own is None:  # what prompts have wrong is said before a build
            rows = render_rows(preparation.renderer, preparation.split(), watch)
        self._build()
        if preparation.own is not None:
            split = preparation.split(self._write(preparation.own))
            rows = render_rows(preparation.renderer, split, watch)
        with AnswerStage(preparation, self._work, self._bundle, rows, watch) as stage:
            noted = self._note(rows, stage)
            self._hours = float(noted["hours"])
            plan = self._plan(rows, noted)
            if only_plan:
                return None
            count = self._answer(stage, rows, plan, noted)
            rows.held_out = stage.choose_measured(rows.held_out[: plan.held_out])
            train = [stage.token_row(row) for row in rows.train[:count]]
            held_out = [
                Answer(row.prompt_ids, stage.store[row], row.set_name) for row in rows.held_out
            ]
        source = noted["source"]
        trained = self._learn(train, held_out, plan, source)
        rows.train = rows.train[:count]
        pair = finish(
            preparation, self._builder, trained, rows, train, source, watch, began=self._started
        )
        (self._work.root / _PLAN).unlink()
        self._work.keep_said()  # what else is there is published, or large
        return pair

    def _has_time(self, share: float) -> Callable[[], bool]:
        """Whether this share of the hours behind the writing is not over, in this run."""
        end = self._started + self._written_s + share * self._hours * 3600
        return lambda: time.monotonic() < end

    def _build(self) -> None:
        """Builds a bundle of the draft as it begins: what cannot be served ends here."""
        folder, preparation = self._work.stage("begin", self._parts).folder, self._preparation
        draft = folder / "draft"
        draft.mkdir(exist_ok=True)
        if self._shape.kind == "MTP" and self._request.start is None:
            self._watch.warn("the target's checkpoint has no MTP layer: one begins anew")
        model = start_draft(self._shape, self._request.start, self._request.seed)
        model.save(draft, load_ends(preparation.target.spec))
        self._builder = PairBuilder(preparation.target, draft, preparation.max_length)
        started = time.perf_counter()
        self._bundle = self._builder.build(draft, folder / "bundle", progress=self._watch)
        self._build_s = time.perf_counter() - started

    def _write(self, own: TrainingSet) -> list[PromptRow]:
        """The prompts that the target writes; those that it wrote already are kept."""
        preparation, watch = self._preparation, self._watch
        stage, began = self._work.stage("prompts", preparation.prompt_parts()), time.monotonic()
        watch.stage(f"writing {own.count:,} prompts", own.count, "steps")
        with (
            JsonLines(stage.folder / "rounds.jsonl") as lines,
            open_target(self._bundle, self._request) as pair,
            closing(PromptWriter(preparation, pair, lines)) as writer,
        ):
            rows, written = writer.write(own, watch.advance)
        watch.show_written(written)
        self._written_s = time.monotonic() - began
        return rows

    def _note(self, rows: RenderedRows, stage: AnswerStage) -> dict[str, Any]:
        """What plan.json holds: who computes features, and how fast this machine is."""
        path, key, preparation = self._work.root / _PLAN, digest(self._parts), self._preparation
        noted = read_json_object(path) if path.is_file() else {}
        if noted.get("key") == key:
            return noted
        self._watch.stage("measuring this machine", None)
        some = [row.prompt_ids for row in rows.train]
        with Replay(self._bundle, threads=self._request.threads) as replay:
            is_faster = uses_teacher(
                preparation.target,
                self._shape.target_layer_ids,
                preparation.device,
                some,
                self._told_by(replay),
            )
        source = "transformers" if is_faster else "graphs"
        hours = self._request.hours - self._written_s / 3600
        noted = {"key": key, "source": source, "rates": None, "used": None, "hours": hours}
        if self._request.rows is None or self._request.steps is None:
            noted["rates"] = asdict(self._measure(rows, stage, source))
        write_json(path, noted)
        return noted

    def _measure(self, rows: RenderedRows, stage: AnswerStage, source: str) -> Rates:
        """Answers some prompts, computes some features, and trains ten steps."""
        answer_s = stage.measure()
        self._watch.stage("measuring this machine", None)
        answered = [stage.token_row(row) for row in rows.train if row in stage.store]
        ends = list(accumulate(len(row.token_ids) for row in answered))
        enough = sum(end < _MEASURED_TOKENS for end in ends) + 1
        some = answered[: max(enough, self._preparation.settings.rows)]
        with tempfile.TemporaryDirectory(prefix="measured-", dir=self._work.root) as name:
            with self._features(source) as compute:
                compute(some[0].token_ids)  # what a first call takes, it takes once
                started = time.perf_counter()
                store = capture(some, self._shape.feature_width, compute, Path(name))
                features_s = (time.perf_counter() - started) / len(some)
            trainer = self._trainer(store, _WARM_STEPS + _TIMED_STEPS)
            for step in range(1, _WARM_STEPS + 1):
                started = time.perf_counter()
                trainer.train(step)
            check_hours(self._request, features_s, time.perf_counter() - started)
            started = time.perf_counter()
            trainer.train(_WARM_STEPS + _TIMED_STEPS)
        return Rates(
            answer_s=answer_s,
            features_s=features_s,
            step_s=(time.perf_counter() - started) / _TIMED_STEPS,
            build_s=self._build_s,
            row_tokens=ends[-1] / len(answered),
        )

    def _plan(self, rows: RenderedRows, noted: dict[str, Any]) -> Plan:
        request, settings = replace(self._request, hours=self._hours), self._preparation.settings
        rates = None if noted["rates"] is None else Rates(**noted["rates"])
        plan = make_plan(request, rates, len(rows.train), len(rows.held_out), settings.rows)
        self._watch.show_plan(plan, describe(self._shape, settings, noted["source"]))
        if not request.online and noted["used"] is None:
            least = sum(len(row.prompt_ids) for row in rows.train[: plan.rows])
            tokens = least if rates is None else round(plan.rows * rates.row_tokens)
            check_space(tokens, self._shape.feature_width, self._work.root)
        return plan

    def _answer(
        self, stage: AnswerStage, rows: RenderedRows, plan: Plan, noted: dict[str, Any]
    ) -> int:
        """Answers what is planned; returns how many rows there are to train on, and notes it."""
        if noted["used"] is not None:
            return int(noted["used"])
        wanted, is_fixed = rows.train[: plan.rows], self._request.rows is not None
        stage.answer(rows.held_out[: plan.held_out], lambda: True)
        count = stage.answer(wanted, (lambda: True) if is_fixed else self._has_time(_ANSWERS_END))
        stage.warn_of_strangers(wanted[:count])
        if count < len(wanted):
            self._watch.warn(f"answers took longer than planned: {count:,} of {len(wanted):,}")
        write_json(self._work.root / _PLAN, noted | {"used": count})
        return count

    def _learn(
        self, train: Sequence[TokenRow], held_out: Sequence[Answer], plan: Plan, source: str
    ) -> TrainedDraft:
        """The best draft of a training on `train`, measured on `held_out`."""
        answers = [[*row.prompt_ids, -1, *row.answer_ids] for row in train]
        parts = self._parts | {"answers": answers, "source": source}
        with self._open_store(train, parts, source) as store:
            parts |= {
                "plan": [plan.steps, plan.evaluation_steps],
                "held_out": [[*one.prompt_ids, -1, *map(int, one.token_ids)] for one in held_out],
            }
            folder = self._work.stage("train", parts).folder

            def measure(draft: Path) -> Acceptance:
                bundle = self._builder.build(draft, folder / "bundle")
                with Replay(bundle, threads=self._request.threads) as replay:
                    return replay.measure(held_out, self._watch)

            return TrainStage(
                folder,
                self._trainer(store, plan.steps),
                measure,
                self._watch,
                evaluation_steps=plan.evaluation_steps,
                has_time=self._has_time(_TRAINING_ENDS),
                is_fixed=self._request.steps is not None,
                measures_start=self._request.start is not None,
            ).run()

    @contextmanager
    def _open_store(
        self, train: Sequence[TokenRow], parts: dict[str, Any], source: str
    ) -> Iterator[FeatureStore]:
        """The features of `train`: computed as they are used, or captured unless they are there."""
        stage = None if self._request.online else self._work.stage("features", parts)
        if stage is not None and stage.record is not None:
            yield open_store(stage.folder)
            return
        with self._features(source) as compute:
            if stage is None:
                yield online_store(train, compute)
                return
            tokens = sum(len(row.token_ids) for row in train)
            self._watch.stage("capturing features", tokens, "tokens")
            width = self._shape.feature_width
            store = capture(train, width, compute, stage.folder, self._watch.advance)
        stage.finish({"tokens": tokens})
        yield store

    @contextmanager
    def _features(self, source: str) -> Iterator[Features]:
        """What computes the features of a row."""
        if source == "transformers":
            target, device = self._preparation.target, self._preparation.device
            yield Teacher(target.folder, self._shape.target_layer_ids, device).features
            return
        with Replay(self._bundle, threads=self._request.threads) as replay:
            yield self._told_by(replay)

    def _told_by(self, replay: Replay) -> Features:
        """What the graphs tell of the draft's features, and no more: an MTP layer taps nothing."""
        return lambda ids: replay.features(ids)[:, -self._shape.feature_width :]

    def _trainer(self, store: FeatureStore, steps: int) -> Trainer:
        """A trainer at step 0, on its device."""
        preparation = self._preparation
        settings = replace(preparation.settings, steps=steps)
        model = start_draft(self._shape, self._request.start, settings.seed)
        ends = load_ends(preparation.target.spec)
        return Trainer(model.to(preparation.device), ends, store, settings)

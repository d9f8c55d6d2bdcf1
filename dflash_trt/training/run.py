"""`train-draft`: from a target and prompts to a proven pair, stage by stage.

answers → features → training, measured by replay → build and proof. What a stage has finished, and
what an unfinished one has written, the next run of the same command goes on with.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch

from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.core.files import resolved
from dflash_trt.core.machine import processor
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.decoding.replay import Answer, Replay
from dflash_trt.models.draft import read_draft
from dflash_trt.training.answer_stage import AnswerStage
from dflash_trt.training.card import DraftRecord
from dflash_trt.training.features import NoSpaceError, TokenRow, check_space
from dflash_trt.training.finish import TrainedPair, finish
from dflash_trt.training.hours_plan import ANSWER_SHARE, Plan, PlanInput, Rates, make_plan
from dflash_trt.training.learner import Learner
from dflash_trt.training.observer import TrainingWatch
from dflash_trt.training.pair_bundle import PairBuilder, choose_batch, join_target
from dflash_trt.training.preparation import Preparation, check_outputs, prepare, target_sha256
from dflash_trt.training.render import RenderedRow, RenderedRows, render_rows
from dflash_trt.training.target_head import load_ends
from dflash_trt.training.teacher import find_source
from dflash_trt.training.train_stage import TrainedDraft
from dflash_trt.training.trainer import start_draft, write_draft
from dflash_trt.training.training_request import TrainRequest
from dflash_trt.training.work_folder import StageFolder, WorkFolder, digest, open_work, write_json

_PLAN, _PUBLISHING = "plan.json", "publishing"
_ANSWERS_END, _TRAINING_ENDS = ANSWER_SHARE + 0.10, 0.95
"""Shares of the hours after which a stage ends, even if it has not come as far as planned."""


def train_draft(
    request: TrainRequest, watch: TrainingWatch, *, only_plan: bool = False
) -> TrainedPair | None:
    """Trains a draft and builds its pair; with `only_plan` shows the plan and returns None.

    Raises:
        DflashError: whatever cannot be done; what was finished stays in the work folder.
    """
    watch.stage("reading prompts and target", None)
    preparation = prepare(request)
    with open_work(preparation.work) as work:
        # A run that was killed while it published may find its own draft.
        overwrite = request.overwrite or (work.root / _PUBLISHING).exists()
        check_outputs(preparation, overwrite=overwrite)
        return _Run(preparation, work, watch).run(only_plan=only_plan, overwrite=overwrite)


class _Run:
    """One run over a work folder."""

    def __init__(self, preparation: Preparation, work: WorkFolder, watch: TrainingWatch) -> None:
        self._preparation, self._work, self._watch = preparation, work, watch
        self._request = preparation.request
        self._started = time.monotonic()

    def run(self, *, only_plan: bool, overwrite: bool) -> TrainedPair | None:
        preparation = self._preparation
        rows = render_rows(preparation.renderer, preparation.rows, self._request.data, self._watch)
        bundle = self._begin()
        with AnswerStage(preparation, self._work, bundle, rows, self._watch) as stage:
            noted = self._note(rows, bundle, stage)
            learner = self._learner(bundle, noted)
            plan = self._plan(rows, noted)
            if only_plan:
                return None
            count = self._answer(stage, rows, plan, noted)
            rows.held_out = stage.choose_measured(rows.held_out[: plan.held_out])
            train = [stage.token_row(row) for row in rows.train[:count]]
            held_out = [_known_answer(row, stage) for row in rows.held_out]
        trained = learner.learn(train, held_out, plan, self._has_time(_TRAINING_ENDS))
        publishing = self._work.root / _PUBLISHING
        publishing.touch()
        pair = finish(
            preparation,
            self._builder,
            trained,
            rows.held_out,
            self._record(trained, rows, train, noted["why"]),
            self._watch,
            overwrite=overwrite,
            seconds=time.monotonic() - self._started,
        )
        for path in (publishing, self._work.root / _PLAN):
            path.unlink()
        self._work.keep_only("answers")  # what else is there is published, or large
        return pair

    def _has_time(self, share: float) -> Callable[[], bool]:
        """Whether this share of the hours is not over; of this run, whatever others took."""
        end = self._started + share * self._request.hours * 3600
        return lambda: time.monotonic() < end

    @cached_property
    def _builder(self) -> PairBuilder:
        """Builds bundles of the target; its folder lies in the stage that begins."""
        preparation, stage = self._preparation, self._begin_stage
        return PairBuilder(
            target=preparation.target,
            folder=join_target(preparation.target, stage.folder / "target"),
            max_seq_len=preparation.max_length,
            max_batch=choose_batch(
                preparation.target.spec, read_draft(stage.folder / "draft"), preparation.max_length
            ),
        )

    @cached_property
    def _begin_stage(self) -> StageFolder:
        return self._work.stage("begin", self._preparation.draft_parts())

    def _begin(self) -> Bundle:
        """A bundle of the target and the draft as it begins: what cannot be served ends here."""
        stage, preparation = self._begin_stage, self._preparation
        folder = stage.folder / "bundle"
        if stage.record is None:
            draft = stage.folder / "draft"
            draft.mkdir(exist_ok=True)
            model = start_draft(preparation.chosen.shape, self._request.start, self._request.seed)
            write_draft(model, draft, load_ends(preparation.target.spec))
            started = time.perf_counter()
            self._builder.build(draft, folder, progress=self._watch)
            stage.finish({"build_s": time.perf_counter() - started})
        return open_bundle(folder)

    def _learner(self, bundle: Bundle, noted: dict[str, Any]) -> Learner:
        return Learner(
            self._preparation, self._work, self._watch, bundle, self._builder, noted["source"]
        )

    def _note(self, rows: RenderedRows, bundle: Bundle, stage: AnswerStage) -> dict[str, Any]:
        """What plan.json holds: who computes features, and how fast this machine is."""
        path, key = self._work.root / _PLAN, digest(self._preparation.plan_parts())
        noted = read_json_object(path) if path.is_file() else {}
        if noted.get("key") == key:
            return noted
        self._watch.stage("measuring this machine", None)
        with Replay(bundle, threads=self._request.threads) as replay:
            some = [row.prompt_ids for row in rows.train]
            source, why = find_source(self._preparation, some, replay)
        noted = {"key": key, "source": source, "why": why, "rates": None, "used": None}
        if self._request.data.rows is None or self._request.recipe.steps is None:
            noted["rates"] = asdict(self._measure(rows, stage, self._learner(bundle, noted)))
        write_json(path, noted)
        return noted

    def _measure(self, rows: RenderedRows, stage: AnswerStage, learner: Learner) -> Rates:
        answer_s = stage.measure()
        self._watch.stage("measuring this machine", None)
        answered = [stage.token_row(row) for row in rows.train if row in stage.store]
        features_s, step_s = learner.measure(answered)
        return Rates(
            answer_s=answer_s,
            features_s=features_s,
            step_s=step_s,
            build_s=(self._begin_stage.record or {})["build_s"],
            row_tokens=sum(len(row.token_ids) for row in answered) / len(answered),
        )

    def _plan(self, rows: RenderedRows, noted: dict[str, Any]) -> Plan:
        request, preparation = self._request, self._preparation
        rates = None if noted["rates"] is None else Rates(**noted["rates"])
        plan = make_plan(
            rates,
            PlanInput(
                hours=request.hours,
                available=len(rows.train),
                held_out=len(rows.held_out),
                keeps_held_out=bool(request.data.held_out),
                batch_rows=preparation.recipe.settings.rows,
                rows=request.data.rows,
                steps=request.recipe.steps,
            ),
        )
        self._watch.show_plan(plan, {**preparation.reasons, "features": noted["why"]})
        if not request.online and noted["used"] is None:
            least = sum(len(row.prompt_ids) for row in rows.train[: plan.rows])
            tokens = least if rates is None else round(plan.rows * rates.row_tokens)
            try:
                check_space(tokens, preparation.width, self._work.root)
            except NoSpaceError:
                self._work.is_refused = True
                raise
        return plan

    def _answer(
        self, stage: AnswerStage, rows: RenderedRows, plan: Plan, noted: dict[str, Any]
    ) -> int:
        """Answers what is planned; returns how many rows there are to train on, and notes it."""
        if noted["used"] is not None:
            return int(noted["used"])
        wanted = rows.train[: plan.rows]
        stage.answer(rows.held_out[: plan.held_out], lambda: True)
        is_fixed = self._request.data.rows is not None
        count = stage.answer(wanted, (lambda: True) if is_fixed else self._has_time(_ANSWERS_END))
        stage.warn_of_strangers(wanted[:count])
        if count < len(wanted):
            self._watch.warn(f"answers took longer than planned: {count:,} of {len(wanted):,}")
        write_json(self._work.root / _PLAN, noted | {"used": count})
        return count

    def _record(
        self, trained: TrainedDraft, rows: RenderedRows, train: list[TokenRow], features: str
    ) -> DraftRecord:
        preparation, request = self._preparation, self._request
        sets = Counter(row.set_name for row in rows.train[: len(train)])
        return DraftRecord(
            target=preparation.target.name,
            target_sha256=target_sha256(preparation.target.spec.checkpoint),
            hashes=preparation.hashes,
            sets=dict(sorted(sets.items())),
            rows=len(train),
            held_out=len(rows.held_out),
            tokens=sum(len(row.token_ids) for row in train),
            answers=_describe_answers(preparation),
            hours=request.hours,
            machine=_describe_machine(preparation),
            system_prompt=request.data.system_prompt,
            template_options=preparation.renderer.variables,
            shape=preparation.chosen.shape,
            settings=replace(preparation.recipe.settings, steps=trained.steps),
            reasons={**preparation.reasons, "features": features},
            evaluations=trained.evaluations,
            best=trained.best,
            ended=trained.ended,
            start=None if request.start is None else resolved(request.start).name,
        )


def _known_answer(row: RenderedRow, stage: AnswerStage) -> Answer:
    tags = () if row.category is None else (row.category,)
    return Answer(row.prompt_ids, stage.store[row], row.set_name, tags)


def _describe_answers(preparation: Preparation) -> str:
    data, endpoint = preparation.request.data, preparation.request.endpoint
    if data.given_answers:
        return "given with the prompts"
    how = "greedy" if data.temperature == 0 else f"at temperature {data.temperature:g}"
    by = "dflash-trt" if endpoint.url is None else "an OpenAI-compatible server"
    return f"the target's own, {how}, from {by}, {data.answer_tokens} tokens at most"


def _describe_machine(preparation: Preparation) -> str:
    """What trains."""
    if preparation.device == "cpu":
        threads, name = preparation.request.threads, processor()
        what = f"{name}, {threads} thread{'s' * (threads > 1)}"
    else:
        what = torch.cuda.get_device_name()
    return f"{what}, torch {torch.__version__}"

"""`train-draft`: from a target and prompts to a proven pair, stage by stage.

render → answers → features → training, measured by replay → build and proof. What a stage has
finished, and what an unfinished one has written, the next run of the same command goes on with.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, cast

import torch

from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.core.files import resolved
from dflash_trt.core.machine import processor
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.replay import Answer, Replay
from dflash_trt.training.answer_stage import AnswerStage
from dflash_trt.training.capture import NoSpaceError, check_space, feature_bytes
from dflash_trt.training.card import DraftRecord
from dflash_trt.training.draft_model import save_draft
from dflash_trt.training.eagle_model import EagleModel, save_eagle
from dflash_trt.training.finish import Proof, TrainedPair, finish
from dflash_trt.training.learner import Learner
from dflash_trt.training.pair_bundle import PairBuilder, choose_batch, join_target
from dflash_trt.training.plan import (
    Plan,
    PlanInput,
    Rates,
    check_plan,
    make_plan,
)
from dflash_trt.training.preparation import (
    RECORD_NAME,
    Preparation,
    check_outputs,
    plan_key,
    prepare,
    target_sha256,
)
from dflash_trt.training.probe import ProbeSetup, probe
from dflash_trt.training.render_stage import RenderedRows, render_rows
from dflash_trt.training.request import TrainRequest
from dflash_trt.training.target_head import load_ends
from dflash_trt.training.teacher import find_source, open_features
from dflash_trt.training.train_stage import TrainedDraft, read_evaluation
from dflash_trt.training.trainer_setup import start_draft
from dflash_trt.training.watch import TrainingWatch
from dflash_trt.training.work_folder import StageFolder, WorkFolder, open_work, write_json

_PLAN, _PUBLISHING, _PUBLISHED = "plan.json", "publishing", "published.json"
_ANSWER_SHARE = 0.45
"""Of the hours: answers end here even if there are fewer than planned."""


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
        if (published := _read_published(preparation, work)) is not None and not only_plan:
            _clean(work)
            return published
        # A run that was killed while it published may find its own draft.
        overwrite = request.overwrite or (work.root / _PUBLISHING).exists()
        check_outputs(preparation, overwrite=overwrite)
        return _Run(preparation, work, watch).run(only_plan=only_plan)


class _Run:
    """One run over a work folder."""

    def __init__(self, preparation: Preparation, work: WorkFolder, watch: TrainingWatch) -> None:
        self._preparation, self._work, self._watch = preparation, work, watch
        self._request = preparation.request

    def run(self, *, only_plan: bool) -> TrainedPair | None:
        rows = render_rows(self._preparation, self._work, self._watch)
        bundle = self._begin()
        with AnswerStage(
            self._preparation, self._work, bundle, rows.train, rows.held_out, self._watch
        ) as stage:
            try:
                noted = self._plan(stage, bundle, rows)
            except NoSpaceError:
                self._work.is_refused = True
                raise
            if only_plan:
                return None
            self._answer(stage, rows, noted)
            count = int(noted["used"])
            asked = self._make_plan(noted, stage, rows).held_out
            rows.held_out = stage.choose_measured(rows.held_out[:asked])
            train = [stage.token_row(row) for row in rows.train[:count]]
            held_out = [
                Answer(
                    row.prompt_ids,
                    stage.store[row],
                    row.set_name,
                    () if row.category is None else (row.category,),
                )
                for row in rows.held_out
            ]
        features = noted["features"]
        learner = Learner(
            self._preparation,
            self._work,
            self._watch,
            bundle,
            self._builder.build,
            features["source"],
        )
        trained = learner.learn(train, held_out, Rates(**noted["rates"]))
        tokens = sum(len(row.token_ids) for row in train)
        publishing = self._work.root / _PUBLISHING
        overwrite = self._request.overwrite or publishing.exists()
        publishing.touch()
        pair = finish(
            self._preparation,
            self._builder,
            trained,
            rows.held_out,
            self._record(trained, rows, count, tokens, features["why"]),
            self._watch,
            overwrite=overwrite,
            seconds=self._work.spent,
        )
        told = asdict(pair) | {"draft": None, "bundle": None}
        write_json(self._work.root / _PUBLISHED, {"key": plan_key(self._preparation), "pair": told})
        _clean(self._work)
        return pair

    def _record(
        self, trained: TrainedDraft, rows: RenderedRows, count: int, tokens: int, features: str
    ) -> DraftRecord:
        preparation, request = self._preparation, self._request
        return DraftRecord(
            target=preparation.target.name,
            target_sha256=target_sha256(preparation.target.spec.checkpoint),
            hashes=preparation.hashes,
            sets=dict(sorted(Counter(row.set_name for row in rows.train[:count]).items())),
            rows=count,
            held_out=len(rows.held_out),
            tokens=tokens,
            answers=_describe_answers(preparation),
            hours=request.hours,
            machine=_describe_machine(preparation),
            system_prompt=request.data.system_prompt,
            template_options=preparation.renderer.variables,
            shape=preparation.chosen.shape,
            settings=replace(preparation.recipe.settings, steps=trained.schedule_steps),
            reasons={**preparation.reasons, "features": features},
            evaluations=trained.evaluations,
            best=trained.best,
            ended=trained.ended,
            start=None if request.start is None else resolved(request.start).name,
        )

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
        parts = {**self._preparation.target_parts(), **self._preparation.start_parts()}
        return self._work.stage("begin", parts)

    def _begin(self) -> Bundle:
        """A bundle of the target and the draft as it begins: what cannot be served ends here."""
        stage, preparation = self._begin_stage, self._preparation
        folder = stage.folder / "bundle"
        if stage.record is None:
            draft = stage.folder / "draft"
            draft.mkdir(exist_ok=True)
            shape, request = preparation.chosen.shape, self._request
            model = start_draft(shape, request.start, request.seed)
            if isinstance(model, EagleModel):
                save_eagle(model, draft, load_ends(preparation.target.spec))
            else:
                save_draft(model, draft)
            started = time.perf_counter()
            self._builder.build(draft, folder, progress=self._watch)
            stage.finish({"build_s": time.perf_counter() - started})
            self._work.tick()
        return open_bundle(folder)

    def _plan(self, stage: AnswerStage, bundle: Bundle, rows: RenderedRows) -> dict[str, Any]:
        """What plan.json holds: rates, and the seconds that were spent when it was made."""
        path, key = self._work.root / _PLAN, plan_key(self._preparation)
        noted = read_json_object(path) if path.is_file() else {}
        if noted.get("key") != key:
            speed = stage.probe()
            self._watch.stage("measuring this machine", None)
            answered = [stage.token_row(row) for row in rows.train if row in stage.store]
            with Replay(bundle, threads=self._request.threads) as replay:
                source, why = find_source(self._preparation, answered, replay)
                rates = probe(
                    self._probe_setup(),
                    answered,
                    replay,
                    lambda: open_features(source, self._preparation, bundle),
                    answer_tokens_s=speed,
                    build_s=(self._begin_stage.record or {})["build_s"],
                    folder=self._work.root,
                )
            noted = {
                "key": key,
                "rates": asdict(rates),
                "spent": round(self._work.spent, 1),
                "features": {"source": source, "why": why},
                "used": None,
            }
            write_json(path, noted)
            self._work.tick()
        plan = self._make_plan(noted, stage, rows)
        reasons = {**self._preparation.reasons, "features": noted["features"]["why"]}
        self._watch.show_plan(plan, reasons)
        if self._request.data.rows is None and self._request.recipe.steps is None:
            check_plan(plan, noted["spent"])
        if not self._request.online and noted["used"] is None:
            check_space(plan.tokens, self._preparation.width, self._work.root)
        return noted

    def _make_plan(self, noted: dict[str, Any], stage: AnswerStage, rows: RenderedRows) -> Plan:
        request = self._request
        return make_plan(
            Rates(**cast(dict[str, float], noted["rates"])),
            PlanInput(
                hours=request.hours,
                spent=cast(float, noted["spent"]),
                available=len(rows.train),
                held_out=len(rows.held_out),
                given=sum(row.answer_ids is not None for row in [*rows.train, *rows.held_out]),
                feature_bytes=0 if request.online else feature_bytes(1, self._preparation.width),
                batch_rows=self._preparation.recipe.settings.rows,
                rows=request.data.rows,
                steps=request.recipe.steps,
                keeps_held_out=bool(request.data.held_out),
            ),
        )

    def _probe_setup(self) -> ProbeSetup:
        preparation = self._preparation
        return ProbeSetup(
            target=preparation.target,
            shape=preparation.chosen.shape,
            settings=preparation.recipe.settings,
            device=preparation.device,
            threads=self._request.threads,
        )

    def _answer(self, stage: AnswerStage, rows: RenderedRows, noted: dict[str, Any]) -> None:
        """Answers what the plan says; notes in it how many rows there are to train on."""
        if noted["used"] is not None:
            return
        plan = self._make_plan(noted, stage, rows)
        wanted = rows.train[: plan.rows]
        limit = _ANSWER_SHARE * self._request.hours * 3600
        is_fixed = self._request.data.rows is not None
        stage.answer(rows.held_out[: plan.held_out], lambda: True)
        count = stage.answer(wanted, lambda: is_fixed or self._work.spent < limit)
        stage.warn_of_strangers(wanted[:count])
        if count < len(wanted):
            self._watch.warn(f"answers took longer than planned: {count:,} of {len(wanted):,}")
        noted["used"] = count
        write_json(self._work.root / _PLAN, noted)


def _clean(work: WorkFolder) -> None:
    """Keeps prompts and answers; everything else has been published or is large."""
    work.keep_only("render", "answers")
    work.forget_time()
    for name in (_PLAN, _PUBLISHING, _PUBLISHED):  # the last one last: it says that all is done
        (work.root / name).unlink(missing_ok=True)


def _read_published(preparation: Preparation, work: WorkFolder) -> TrainedPair | None:
    """What this command published before it was killed, while it cleaned up."""
    path = work.root / _PUBLISHED
    if not path.is_file() or not (preparation.request.output / RECORD_NAME).is_file():
        return None
    noted = read_json_object(path)
    if noted["key"] != plan_key(preparation):
        return None
    pair = noted["pair"]
    return TrainedPair(
        draft=preparation.request.output,
        bundle=preparation.bundle,
        best=read_evaluation(pair["best"]),
        evaluations=tuple(map(read_evaluation, pair["evaluations"])),
        ended=pair["ended"],
        proof=Proof(**pair["proof"]),
        seconds=pair["seconds"],
    )


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

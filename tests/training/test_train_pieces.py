"""The pieces of `train-draft` that survive a kill or decide something, each by itself."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from ml_dtypes import bfloat16

import dflash_trt
from dflash_trt.backends.base import FloatArray
from dflash_trt.errors import DflashError
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.training.answers import AnswerStore, LocalAnswerer
from dflash_trt.training.endpoint import AnswerOptions
from dflash_trt.training.features import TokenRow, capture, online_store
from dflash_trt.training.hours_plan import (
    ANSWER_SHARE,
    LEAST_MEASUREMENTS,
    MAX_EPOCHS,
    TRAINING_SHARE,
    Plan,
    Rates,
    make_plan,
)
from dflash_trt.training.observer import TrainedDraft
from dflash_trt.training.recipe import choose_mask_token, default_taps
from dflash_trt.training.train_stage import TrainStage
from dflash_trt.training.training_request import TrainRequest
from dflash_trt.training.work_folder import JsonLines, open_work
from tests.cli.bigram import write_bigram_pair
from tests.training.prompts import TARGET, contents, rendered

ROWS = [TokenRow([1, 2, 3], [4, 5]), TokenRow([6], [7, 8, 9, 10]), TokenRow([2] * 9, [3])]


def features_of(ids: Sequence[int]) -> FloatArray:
    """Two numbers a token, of which bfloat16 holds neither."""
    column = np.array(ids, np.float32)
    return np.stack([column / 3, -column * 1.001], axis=1)


@pytest.mark.parametrize("tail", [b'{"row": 2', b"\xff\xfe\n"])
def test_a_torn_line_is_dropped_and_written_over(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "answers.jsonl"
    with JsonLines(path) as lines:
        lines.append({"row": 1, "text": "ü\n"})
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    with JsonLines(path) as lines:
        assert lines.records == [{"row": 1, "text": "ü\n"}]
        lines.append({"row": 2})
    assert path.read_bytes() == whole + b'{"row":2}\n'


def test_an_answer_that_repeats_itself_ends_there(tmp_path: Path) -> None:
    """It is not asked for any further, and its third repetition is the last that is kept."""
    config = write_bigram_pair(tmp_path)
    options = AnswerOptions(answer_tokens=90, max_length=128, temperature=0.0, seed=0)
    ends: list[int] = []
    with dflash_trt.load(dflash_trt.build(str(config), tmp_path / "bundle").folder) as pair:
        row = rendered("cab", pair.request("cab").prompt_ids)
        LocalAnswerer(pair, options).answer([row], lambda index, said: ends.append(len(said)))
        with JsonLines(tmp_path / "answers.jsonl") as lines:
            store = AnswerStore(lines, [replace(row, row_id="6", answer_ids=(*[1, 2] * 30, 3))])
            assert store.fill([row], LocalAnswerer(pair, options), lambda count: None) == 1
    assert 24 <= ends[0] < 40
    a, b = store[row][:2]
    assert store[row] == (a, b) * 12
    assert store[replace(row, row_id="6")] == (1, 2) * 12
    with JsonLines(tmp_path / "answers.jsonl") as lines:
        assert [len(record["ids"]) for record in lines.records] == [24]


def test_features_are_those_of_every_token_in_bfloat16(tmp_path: Path) -> None:
    store = capture(ROWS, 2, features_of, tmp_path)
    assert store.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, *[2] * 9, 3]
    assert store.rows.tolist() == [[0, 3, 5], [5, 1, 5], [10, 9, 10]]
    expected = features_of(store.tokens.tolist()).astype(bfloat16)
    assert (np.array(store.features).view(bfloat16) == expected).all()
    online = online_store(ROWS, features_of)
    assert (online.features[5:10] == store.features[5:10]).all()
    assert (online.rows == store.rows).all() and (online.tokens == store.tokens).all()
    (tmp_path / "b").mkdir()
    with pytest.raises(DflashError, match="features of row 1 are not finite"):
        capture(ROWS, 2, lambda ids: features_of(ids) * (np.nan if 6 in ids else 1), tmp_path / "b")


def test_a_capture_goes_on_where_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trt.training.features._NOTE_TOKENS", 1)
    asked: list[Sequence[int]] = []

    def compute(ids: Sequence[int]) -> FloatArray:
        if len(asked) == 1 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            raise KeyboardInterrupt
        asked.append(ids)
        return features_of(ids)

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    capture(ROWS, 2, features_of, whole)
    with pytest.raises(KeyboardInterrupt):
        capture(ROWS, 2, compute, broken)
    capture(ROWS, 2, compute, broken)
    assert len(asked) == len(ROWS)  # none twice
    assert contents(broken) == contents(whole)


def test_taps_and_mask_tokens_are_those_of_published_drafts(tmp_path: Path) -> None:
    for layers, taps in ((36, (1, 9, 17, 25, 33)), (48, (1, 12, 23, 34, 45)), (6, (1, 2, 3))):
        assert default_taps(layers) == taps
    assert default_taps(3) == default_taps(1) == (0,)
    target = tmp_path / "target"
    shutil.copytree(TARGET, target)
    assert choose_mask_token(BundleTokenizer(target), 464, (0,), None) == 1
    file = target / "tokenizer.json"
    file.write_text(file.read_text().replace("<|mask|>", "<|other|>"))
    tokenizer = BundleTokenizer(target)
    assert choose_mask_token(tokenizer, 500, (0,), None) == 464
    assert choose_mask_token(tokenizer, 464, (0,), None) == 1


RATES = Rates(answer_s=1.0, features_s=0.3, step_s=0.5, build_s=2, row_tokens=300)


def planned(rates: Rates | None, hours: float, **given: int) -> Plan:
    paths: dict[str, Any] = {"target": "", "output": Path(), "prompts": ()}
    return make_plan(TrainRequest(hours=hours, **paths, **given), rates, 5000, 50, 4)


@pytest.mark.parametrize("hours", [0.2, 1, 4, 24])
def test_a_plan_keeps_to_its_shares(hours: float) -> None:
    plan = planned(RATES, hours)
    budget = 3600 * hours
    answers, training = (plan.rows + plan.held_out) * RATES.row_s, plan.steps * RATES.step_s
    assert answers <= ANSWER_SHARE * budget and training <= TRAINING_SHARE * budget
    assert plan.rows == 5000 or answers > 0.98 * ANSWER_SHARE * budget
    most = MAX_EPOCHS * plan.steps_per_epoch
    assert plan.steps == most or training > 0.98 * TRAINING_SHARE * budget
    assert plan.held_out == (19 if hours == 0.2 else 50)
    assert plan.steps / plan.evaluation_steps >= LEAST_MEASUREMENTS - 1


def test_plans_of_too_few_hours_and_of_no_clock() -> None:
    with pytest.raises(DflashError, match=r"0\.02 h are too few .* would take 0\.025 h"):
        planned(RATES, 0.02)
    assert planned(RATES, 0.02, rows=100).steps >= 20  # who says how many knows
    plan = planned(None, 1, rows=100, steps=70)
    assert (plan.rows, plan.steps, plan.steps_per_epoch) == (100, 70, 25)
    assert (plan.held_out, plan.evaluation_steps) == (16, 18)
    assert planned(RATES, 1, rows=100, steps=70).evaluation_steps == 18


def test_a_work_folder_is_one_processs_and_removes_stages_alone(tmp_path: Path) -> None:
    root = tmp_path / "work"
    with open_work(root), pytest.raises(DflashError, match="in use by another training"):
        open_work(root).__enter__()
    assert not root.exists()  # nothing was answered
    with open_work(root) as work:
        gone = work.stage("train", {"a": 1}).folder
        kept = work.stage("answers", {"a": 1}).folder
        (kept / "answers.jsonl").write_text("{}\n")
        others = [root / name for name in ("draft", "train-data", "draft-bundle")]
        for other in others:
            other.mkdir()
        now = work.stage("train", {"a": 2}).folder
        assert now.is_dir() and not gone.exists()
        work.keep_said()
        assert not now.exists() and all(one.is_dir() for one in (kept, *others))
    (root / "lock").unlink()
    with pytest.raises(DflashError, match="is no work folder of a training"):
        open_work(root).__enter__()


STEPS, EVERY = 40, 8


@dataclass
class CountingTrainer:
    """A trainer whose draft says how many steps it has seen."""

    interrupted_at: int | None = None
    diverges_at: int = STEPS
    losses: list[float] = field(default_factory=list)
    steps_per_epoch = 4
    settings = SimpleNamespace(steps=STEPS)
    model = SimpleNamespace(shape=SimpleNamespace(dflash2=None))

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
        tau = taus[int((draft / "draft").read_text()) // EVERY]
        slots = {"conditional_acceptance": (0.5, None), "recall_at_16": (1.0, None)}
        return SimpleNamespace(acceptance_length=tau, sets={}, **slots)

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

"""The pieces of `train-draft` that survive a kill or decide something, each by itself."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import dflash_trt
from dflash_trt.backends.base import FloatArray
from dflash_trt.errors import DflashError
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.training.answers import AnswerStore, LocalAnswerer
from dflash_trt.training.endpoint import AnswerOptions
from dflash_trt.training.features import TokenRow, capture, online_store, open_store
from dflash_trt.training.hours_plan import (
    ANSWER_SHARE,
    LEAST_MEASUREMENTS,
    MAX_EPOCHS,
    TRAINING_SHARE,
    Plan,
    Rates,
    make_plan,
)
from dflash_trt.training.recipe import choose_mask_token, default_taps
from dflash_trt.training.rows import RenderedRow
from dflash_trt.training.work_folder import JsonLines, open_work
from tests.cli.bigram import write_bigram_pair
from tests.training.prompts import TARGET

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
        ids = tuple(pair.request("cab").prompt_ids)
        row = RenderedRow(
            row_id="5",
            set_name="",
            category=None,
            messages=(),
            text="cab",
            prompt_ids=ids,
            answer_ids=None,
        )
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
    for name in ("tokens.npy", "rows.npy", "features.npy"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()


def test_features_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match="features of row 1 are not finite"):
        capture(ROWS, 2, lambda ids: features_of(ids) * (np.nan if 6 in ids else 1), tmp_path)
    np.save(tmp_path / "tokens.npy", [1])
    with pytest.raises(DflashError, match="is not a store of features"):
        open_store(tmp_path)


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        (36, (1, 9, 17, 25, 33)),
        (32, (1, 8, 15, 22, 29)),
        (48, (1, 12, 23, 34, 45)),
        (6, (1, 2, 3)),
        (3, (0,)),
        (1, (0,)),
    ],
)
def test_taps_are_those_of_published_drafts(layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(layers) == taps


def test_a_mask_token_is_named_reserved_or_behind_the_tokenizer(tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(TARGET, target)
    tokenizer = BundleTokenizer(target)
    assert choose_mask_token(tokenizer, 464, (0,), None) == 1
    file = target / "tokenizer.json"
    file.write_text(file.read_text().replace("<|mask|>", "<|other|>"))
    tokenizer = BundleTokenizer(target)
    assert choose_mask_token(tokenizer, 500, (0,), None) == 464
    assert choose_mask_token(tokenizer, 464, (0,), None) == 1


RATES = Rates(answer_s=1.0, features_s=0.3, step_s=0.5, build_s=2, row_tokens=300)


def planned(rates: Rates | None, hours: float, **given: int | None) -> Plan:
    values: dict[str, Any] = {"rows": None, "steps": None, "keeps_held_out": False, **given}
    return make_plan(rates, hours=hours, available=5000, held_out=50, batch_rows=4, **values)


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


def test_hours_that_pay_for_nothing_are_refused() -> None:
    with pytest.raises(DflashError, match=r"0\.02 h are too few .* would take 0\.025 h"):
        planned(RATES, 0.02)
    assert planned(RATES, 0.02, rows=100).steps >= 20  # who says how many knows


def test_what_is_given_needs_no_clock() -> None:
    plan = planned(None, 1, rows=100, steps=70)
    assert (plan.rows, plan.steps, plan.steps_per_epoch) == (100, 70, 25)
    assert (plan.held_out, plan.evaluation_steps) == (16, 18)
    assert planned(RATES, 1, rows=100, steps=70).evaluation_steps == 18


def test_a_work_folder_is_one_processs_and_nothing_elses(tmp_path: Path) -> None:
    root = tmp_path / "work"
    with open_work(root), pytest.raises(DflashError, match="in use by another training"):
        open_work(root).__enter__()
    assert not root.exists()  # nothing was answered
    root.mkdir()
    (root / "thesis.txt").touch()
    with pytest.raises(DflashError, match="is no work folder of a training"):
        open_work(root).__enter__()


def test_a_work_folder_removes_stages_alone(tmp_path: Path) -> None:
    root = tmp_path / "work"
    with open_work(root) as work:
        gone = work.stage("train", {"a": 1}).folder
        kept = work.stage("answers", {"a": 1}).folder
        (kept / "answers.jsonl").write_text("{}\n")
        others = [root / name for name in ("draft", "train-data", "draft-bundle")]
        for other in others:
            other.mkdir()
        now = work.stage("train", {"a": 2}).folder
        assert now.is_dir() and not gone.exists()
        work.keep_answers()
        assert not now.exists() and all(one.is_dir() for one in (kept, *others))

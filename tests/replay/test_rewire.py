"""A rewired graph drafts what the graph does that was built so from the start."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_trt
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.decoding.replay import Answer, Edits, Replay
from dflash_trt.decoding.replay.edits import GraphEdit
from dflash_trt.decoding.replay.replayed_acceptance import StepTable
from dflash_trt.decoding.replay.rewire import (
    rotate_draft,
    set_windows,
    tap_layers,
)
from dflash_trt.models.rope import RopeSpec
from dflash_trt.text.prompts import read_prompts
from tests.diagnosis.pairs import build
from tests.shared import Shared

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
CHANGED: dict[str, Any] = {
    "draft": WINDOWS | {"rope_theta": 3e4},
    "dflash": {"target_layer_ids": [1, 2, 3, 4, 5]},
}
TOKENS = 16


def _build(folder: Path, changes: dict[str, Any], *options: str) -> None:
    build(folder, "gpt-oss", *options, **changes)


def _rotate(theta: float) -> GraphEdit:
    return rotate_draft(RopeSpec(theta), 32, 1024)


@pytest.fixture(scope="module")
def good(shared: Shared) -> Bundle:
    return open_bundle(shared.folder(_build, {}) / "bundle")


@pytest.fixture(scope="module")
def answers(good: Bundle) -> list[Answer]:
    assert good.prompts is not None
    texts = read_prompts(good.prompts)[:2]
    with dflash_trt.load(good.folder) as pair:
        ids = [pair.tokenizer.encode(text) for text in texts]
        results = pair.generate(ids, max_tokens=TOKENS)
    return [Answer(one, result.token_ids) for one, result in zip(ids, results, strict=True)]


def steps(bundle: Bundle, answers: list[Answer], edits: Edits | None = None) -> StepTable:
    with Replay(bundle, edits=edits) as replay:
        return replay.measure(answers).table


def same(one: StepTable, other: StepTable) -> bool:
    """Whether two replays drafted the same tokens with the same bits of confidence."""
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name))
        for field in fields(StepTable)
    )


def test_an_edit_is_a_build(good: Bundle, answers: list[Answer], shared: Shared) -> None:
    """Taps, rope and windows of one bundle put into the other's graphs, there and back."""
    changed = open_bundle(shared.folder(_build, CHANGED) / "bundle")
    before, after = steps(good, answers), steps(changed, answers)
    assert not same(before, after)
    turned = _rotate(3e4)
    there = Edits((tap_layers([1, 2, 3, 4, 5], 6), turned), (set_windows([24, None], None), turned))
    assert same(steps(good, answers, there), after)
    for missing in (
        replace(there, target=there.target[1:]),
        replace(there, draft=there.draft[1:]),
        replace(there, target=there.target[:1], draft=there.draft[:1]),
    ):
        assert not same(steps(good, answers, missing), after)
    turned = _rotate(1e4)
    back = Edits((tap_layers([0, 1, 2, 3, 4], 6), turned), (set_windows([None] * 2, None), turned))
    assert same(steps(changed, answers, back), before)

"""A draft that chooses among some tokens: a smaller head, the same answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_trt
from dflash_trt.building.spec import BuildSpec
from dflash_trt.bundle.dims import int8_models
from dflash_trt.decoding import SamplingParams
from dflash_trt.decoding.replay import Answer, Replay
from dflash_trt.errors import DflashError
from dflash_trt.models.draft_tokens import DRAFT_TOKENS_NAME, write_draft_tokens
from tests.covering import exhaustive
from tests.pairs import PairFactory, TinyPair, bundle_pair

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8]]
PAIRS: dict[str, dict[str, Any]] = {
    "tied": {"family": "llama", "target": {"tie": True}, "fit_steps": 60},
    "bfloat16": {"target": {"dtype": "bfloat16"}, "fit_steps": 60},
    "quantised": {"quantize": {"target": {"algorithm": "FP8"}, "draft": {"algorithm": "FP8"}}},
    "int8": {"family": "llama", "target": {"tie": True}, "fit_steps": 60, "int8": ["target"]},
}

SAMPLED = SamplingParams(temperature=0.9, seed=3)


def cut(pair: TinyPair, ids: list[int]) -> TinyPair:
    """The same pair, whose draft chooses among `ids`."""
    write_draft_tokens(ids, pair.folder / "draft")
    try:
        manifest = pair.bundle.manifest
        int8 = int8_models(manifest.target, manifest.draft)
        return bundle_pair(pair.folder, BuildSpec(overwrite=True), [*int8])
    finally:
        (pair.folder / "draft" / DRAFT_TOKENS_NAME).unlink()


@pytest.mark.parametrize("name", ["tied", "int8", *map(exhaustive, ("bfloat16", "quantised"))])
def test_it_drafts_the_likeliest_of_its_tokens(name: str, make_pair: PairFactory) -> None:
    whole = make_pair(**PAIRS[name], max_batch=3)
    ids = sorted(np.random.default_rng(1).choice(256, 200, replace=False).tolist())
    with dflash_trt.load(whole.bundle.folder) as pair:
        expected = pair.generate(PROMPTS, max_tokens=40)
        answers = [Answer(ids, one.token_ids) for ids, one in zip(PROMPTS, expected, strict=True)]
        with Replay(whole.bundle) as replay:
            before = replay.measure(answers)
    cut_pair = cut(whole, ids)
    assert cut_pair.bundle.manifest.draft.token_count == 200
    with dflash_trt.load(cut_pair.bundle.folder, block_schedule="none") as pair:
        found = pair.generate(PROMPTS, max_tokens=40)
        plain = pair.generate(PROMPTS, max_tokens=40, speculate=False)
        drawn, alone = (
            [one.token_ids for one in pair.generate(PROMPTS, SAMPLED, max_tokens=40, speculate=on)]
            for on in (True, False)
        )
    assert drawn == alone
    tokens = [one.token_ids for one in found]
    assert tokens == [one.token_ids for one in plain] == [one.token_ids for one in expected]
    with Replay(cut_pair.bundle) as replay:
        after = replay.measure(answers)
    counts = [one.statistics.acceptance_histogram for one in found]
    assert [one.acceptance_histogram for one in after.per_answer] == counts
    # What was drafted at the same place is the same wherever it may be named at all.
    was = {(a, p): d for a, p, d in rows(before.table)}
    both = [(was[a, p], d) for a, p, d in rows(after.table) if (a, p) in was]
    named = [(one, other) for old, new in both for one, other in zip(old, new, strict=True)]
    assert sum(one in ids for one, _ in named) > 10
    assert all(one == other for one, other in named if one in ids)
    assert all(other in ids or other < 0 for _, other in named)


def rows(table: Any) -> list[tuple[int, int, list[int]]]:
    return [
        (int(a), int(p), d.tolist())
        for a, p, d in zip(table.answer, table.position, table.draft_ids, strict=True)
    ]


def test_what_says_something_else_is_refused(make_pair: PairFactory) -> None:
    pair = make_pair(max_batch=3)
    path: Path = pair.folder / "draft" / DRAFT_TOKENS_NAME
    refused = {"a list of ascending token ids": ([], [3, 3], [3, True], [-1, 3])}
    refused["names token 256, outside the target's vocabulary of 256"] = ([3, 256],)
    for what, lists in refused.items():
        for ids in lists:
            path.write_text(json.dumps({"token_ids": ids}))
            with pytest.raises(DflashError, match=what):
                bundle_pair(pair.folder, BuildSpec(overwrite=True))
    path.unlink()

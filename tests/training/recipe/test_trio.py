"""The drafts of three kinds that ship: of one size, one training, and of use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dflash_trt
from dflash_trt.models.deepspec import UNUSED
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import check_pair
from dflash_trt.models.target import read_target
from tests.frozen.canonical import ROOT

DEMO = ROOT / "demo_pair"
KINDS = {"dflash": "DFlash", "dspark": "DSpark", "eagle3": "EAGLE-3"}
LEAST_TAU = {"dflash": 3.0, "dspark": 4.0, "eagle3": 3.0}


def test_they_differ_in_kind_alone() -> None:
    target = read_target(DEMO / "target")
    sizes, trained = [], []
    for folder, kind in KINDS.items():
        draft = read_draft(DEMO / "trio" / folder)
        check_pair(target, draft)
        assert (draft.kind, draft.block_size) == (kind, 8)
        lent = {*UNUSED, "lm_head.weight"}  # copies of the target's matrices
        own = draft.checkpoint.tensors.items()
        sizes.append(sum(entry.num_elements for name, entry in own if name not in lent))
        card = (DEMO / "trio" / folder / "README.md").read_text(encoding="utf-8")
        assert f"{sizes[-1]:,} parameters" in card
        record = json.loads((DEMO / "trio" / folder / "training.json").read_text("utf-8"))
        recipe = {name: record[name] for name in ("hashes", "rows", "tokens", "settings", "target")}
        trained.append(recipe)
    assert max(sizes) <= 1.2 * min(sizes)
    assert all(one == trained[0] for one in trained)


@pytest.mark.exhaustive
@pytest.mark.parametrize("folder", KINDS)
def test_they_are_taken_and_change_no_token(folder: str, tmp_path: Path) -> None:
    bundle = dflash_trt.build(f"demo-{folder}", tmp_path / "bundle")
    lines = (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    prompts = [json.loads(line)["prompt"] for line in lines]
    answers, tau = [], 0.0
    for speculation in (True, False):
        with dflash_trt.load(
            bundle.folder, threads=1, block_schedule="none", speculation=speculation
        ) as pair:
            results = pair.generate(prompts, max_tokens=64, ignore_eos=True)
        answers.append([one.token_ids for one in results])
        if speculation:
            steps = sum(one.statistics.steps for one in results)
            tau = sum(len(one.token_ids) - 1 for one in results) / steps
    assert answers[0] == answers[1]
    assert tau > LEAST_TAU[folder]

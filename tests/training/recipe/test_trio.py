"""The drafts of three kinds that ship: of one size, one training, and of use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dflash_trt
from tests.frozen.canonical import ROOT

DEMO = ROOT / "demo_pair"
KINDS = {"dflash": "DFlash", "dspark": "DSpark", "eagle3": "EAGLE-3"}
LEAST_TAU = {"dflash": 3.0, "dspark": 4.0, "eagle3": 3.0}


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

"""`dflash-trt diagnose`, as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.models.build_config import data_folder
from tests.cli.conftest import Outcome
from tests.diagnosis.pairs import build
from tests.shared import Shared

Run = Callable[..., Outcome]
PROMPTS = data_folder("demo_pair") / "prompts.jsonl"
SMALL = ["--limit-prompts", "6", "--max-tokens", "24"]


def _build(folder: Path, **changes: Any) -> None:
    build(folder, "gpt-oss", **changes)


@pytest.fixture(scope="module")
def wrong_mask(shared: Shared) -> Path:
    return shared.folder(_build, dflash={"mask_token_id": 0}) / "bundle"


@pytest.fixture(scope="module")
def good(shared: Shared) -> Path:
    return shared.folder(_build) / "bundle"


def test_a_cause_is_named_and_the_answers_are_kept(
    run: Run, wrong_mask: Path, tmp_path: Path
) -> None:
    output = tmp_path / "found"
    prompts = ["--prompts", f"own={PROMPTS}"]
    outcome = run("diagnose", wrong_mask, *prompts, *SMALL, "-o", output)
    assert outcome.code == 0, outcome.err
    assert "verdict: Acceptance is low because blocks are filled with another mask token" in (
        outcome.out
    )
    assert "- mask token: mask token 1 (<|mask|>)" in outcome.out
    assert "what to do: correct mask_token_id" in outcome.out
    page = (output / "diagnosis.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 1 and "another mask token than in training" in page
    assert "http" not in page.replace("http-equiv", "")
    verdict = json.loads((output / "diagnosis.json").read_text(encoding="utf-8"))["verdict"]
    assert verdict["findings"][0]["cause"] == "mask token"


def test_what_it_refuses(run: Run, good: Path, tmp_path: Path) -> None:
    own = ["--prompts", PROMPTS]
    run("diagnose", good, *own, "--known-answers").fails(2, 'prompt 1 has no "answer"')
    run("diagnose", good, *own, "--thinking", "on").fails(2, "--thinking", "no chat template")
    run("diagnose", good, *own, "--training-rows", PROMPTS, *SMALL).fails(2, 'no "answer"')
    run("diagnose", tmp_path, *own).fails(2, "is not a bundle")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": [464]}\n', encoding="utf-8")
    run("diagnose", good, "--prompts", rows, "--known-answers").fails(2, "token id 464")

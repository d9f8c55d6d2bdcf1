"""A training that is killed at random moments ends with the bytes of one that was not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.training.kills import choose_moments, run_killed, run_whole
from tests.training.prompts import command, contents, write_prompts

KILLS = 10
pytestmark = pytest.mark.exhaustive


def test_ten_kills_change_no_byte(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "shifts.jsonl", 40)
    more = "--rows 24 --steps 60 --answer-tokens 64 --max-length 192".split()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    changes = run_whole(command(prompts, whole / "draft", *more), whole)
    moments = choose_moments(random.Random(0), changes, KILLS)
    assert run_killed(command(prompts, killed / "draft", *more), killed, moments) == KILLS
    drafts = [contents(folder / "draft") for folder in (killed, whole)]
    assert drafts[0] == drafts[1]

"""Acceptance lengths by set of prompts: the loop's counts, loops apart, answers that are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import dflash_perf.bench.task_acceptance as task_acceptance
import pytest
from dflash_perf.__main__ import main

import dflash_trt
from dflash_trt import LoadedPair
from dflash_trt.core.hashing import file_sha256
from dflash_trt.runtime.statistics import total
from dflash_trt.text.prompts import read_prompts
from tests.training.prompts import write_prompts

TOKENS = 40


def record(folder: Path, bundle: Path, *more: str) -> dict[str, Any]:
    arguments = ["bench", "task-acceptance", str(bundle), "--max-tokens", str(TOKENS), *more]
    assert main([*arguments, "--output", str(folder)]) == 0
    (path,) = folder.iterdir()
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_counts_are_those_of_the_loop(tmp_path: Path) -> None:
    bundle = dflash_trt.build("demo", tmp_path / "bundle").folder
    files = {
        name: write_prompts(tmp_path / f"{name}.jsonl", 3, first=9 * i)
        for i, name in enumerate("ab")
    }
    options = [part for name, file in files.items() for part in ("--prompts", f"{name}={file}")]
    kept = ["--answers-file", str(tmp_path / "answers")]
    found = record(tmp_path / "first", bundle, *options, *kept)
    with dflash_trt.load(bundle, threads=1, block_schedule="none") as pair:
        for name, file in files.items():
            results = pair.generate(read_prompts(file), max_tokens=TOKENS)
            sums = total(one.statistics for one in results)
            (one,) = (one for one in found["sets"] if one["name"] == name)
            parts = [one["not_looping"], one["looping"]]
            assert one["prompts"] == sum(part["answers"] for part in parts) == 3
            assert sum(part["steps"] for part in parts) == sums.steps
            assert sum(part["output_tokens"] for part in parts) == sums.output_tokens
            assert found["sha256"][f"prompts {name}"] == file_sha256(file)
    assert [one["name"] for one in found["sets"]] == ["a", "b", "all"]
    assert len(found["sha256"]) > len(files)
    assert str(tmp_path) not in json.dumps(found)  # records name no local folders
    with mock.patch.object(LoadedPair, "run", side_effect=AssertionError("it decoded again")):
        again = record(tmp_path / "second", bundle, *options, *kept)
    assert again["sets"] == found["sets"]


@pytest.mark.parametrize(
    ("token_ids", "repeats"),
    [
        ([7] * 10, True),
        ([7] * 9, False),
        ([*range(8), 99] * 3, True),
        ([*range(8), 99] * 2, False),
        ([1, 2] * 6, True),
        ([], False),
    ],
)
def test_repeats_that_may_overlap(token_ids: list[int], repeats: bool) -> None:
    assert task_acceptance.repeats_with_overlap(token_ids) == repeats

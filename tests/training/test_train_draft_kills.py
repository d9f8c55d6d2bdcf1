"""A training that is killed at random moments ends with the bytes of one that was not."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.prompts import command, contents, write_prompts

KILLS = 10
pytestmark = pytest.mark.exhaustive


def test_ten_kills_change_no_byte(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "shifts.jsonl", 40)
    more = "--rows 24 --steps 60 --answer-tokens 64 --max-length 192".split()
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    started = time.monotonic()
    assert _start(command(prompts, tmp_path / "whole" / "draft", *more, "--hours", 0)).wait() == 2
    loading = time.monotonic() - started
    started = time.monotonic()
    assert _start(command(prompts, tmp_path / "whole" / "draft", *more)).wait() == 0
    working = time.monotonic() - started - loading

    words = command(prompts, tmp_path / "killed" / "draft", *more)
    moments, killed = random.Random(0), 0
    for _ in range(KILLS):
        process = _start(words)
        try:
            process.wait(timeout=loading + moments.uniform(0.02, 0.3) * working)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
        if process.returncode == 0 or _is_done(tmp_path / "killed"):
            break
    else:
        assert _start(words).wait() == 0
    assert killed >= KILLS // 2
    drafts = [contents(tmp_path / name / "draft") for name in ("killed", "whole")]
    assert drafts[0] == drafts[1]


def _is_done(folder: Path) -> bool:
    """Whether a kill came when nothing was left to do."""
    marks = [folder / ".draft.work" / name for name in ("publishing", "published.json")]
    return (folder / "draft").exists() and not any(mark.exists() for mark in marks)


def _start(words: list[str]) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "dflash_trt.cli.main", *words]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL)

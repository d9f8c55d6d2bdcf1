"""A training that is killed at random moments ends with the bytes of one that was not."""

from __future__ import annotations

import random
import signal
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
    whole = _start(command(prompts, tmp_path / "whole" / "draft", *more))
    started = time.monotonic()
    assert whole.wait() == 0
    seconds = time.monotonic() - started

    words = command(prompts, tmp_path / "killed" / "draft", *more)
    moments = random.Random(0)
    killed = 0
    for _ in range(KILLS):
        process = _start(words)
        try:
            code = process.wait(timeout=moments.uniform(0.1, 0.9) * seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
        else:
            assert code == 0
            break
    else:
        assert _start(words).wait() == 0
    assert killed >= 2
    drafts = [contents(tmp_path / name / "draft") for name in ("killed", "whole")]
    assert drafts[0] == drafts[1]


def _start(words: list[str]) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "dflash_trt.cli.main", *words]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL)

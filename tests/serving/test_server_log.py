"""A flood of what a server prints does not fill the disk, and its last words are kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.serving.server.server_log import BURST_BYTES, ServerLog

FLOOD = (
    "import os, sys, time\n"
    "print('first', flush=True)\n"
    f"for _ in range(10): os.write(1, b'accept failed\\n' * {BURST_BYTES // 50})\n"
    "time.sleep(0.5)\n"
    "print('last', flush=True)\n"
)


@pytest.mark.parametrize("is_bounded", [False, True])
def test_a_flood(tmp_path: Path, is_bounded: bool) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    log = ServerLog(path, is_bounded=is_bounded)
    subprocess.run([sys.executable, "-c", FLOOD], stdout=log.output, check=True)
    log.hand_over()
    log.settle()
    text = path.read_text()
    assert text.startswith("before\nfirst\n") and text.endswith("last\n")
    assert log.start == len("before\n")
    assert ("bytes that came too fast are left out" in text) is is_bounded
    assert (len(text) < 1.1 * BURST_BYTES) is is_bounded

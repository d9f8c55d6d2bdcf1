"""A server whose drafts cost more than they bring says so in its log, once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.serving.server.launcher import TritonServer
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from dflash_trt.speculation.schedule import BlockSchedule, merge_ranges
from dflash_trt.tuning.bundle_schedule import write_schedule
from tests.runtime.schedules import invent_measurements
from tests.serving.client import ENDLESS, LLM, ask_grpc, make_fields
from tests.serving.served import PROMPTS, package, server_options
from tests.waiting import PATIENCE_S

REQUESTS = 14


@pytest.mark.exhaustive
@pytest.mark.parametrize(("per_row", "times"), [(1.5, 1), (0.1, 0)])
def test_the_log(
    tritonserver: TritonServerBinary, bundle: Bundle, tmp_path: Path, per_row: float, times: int
) -> None:
    tuned = tmp_path / "bundle"
    shutil.copytree(bundle.folder, tuned, copy_function=os.link)
    # Live acceptance would end such drafts too soon to count, were plain steps not as slow here.
    measured = invent_measurements([8], per_row=per_row, feeding=100)
    blocks = merge_ranges([8] * bundle.manifest.limits.max_batch)
    write_schedule(
        open_bundle(tuned), BlockSchedule(blocks=blocks, executor="cpu", measured=measured)
    )
    log = tmp_path / "server.log"
    options = server_options(package(tuned, tmp_path / "repository"), log_file=log)
    with TritonServer(options) as server:
        server.wait_ready(PATIENCE_S)
        for prompt in PROMPTS[:REQUESTS]:
            fields = make_fields(LLM, prompt, max_tokens=200)
            answer = ask_grpc(server.addresses.grpc, LLM, fields, parameters=ENDLESS)
            assert answer.error is None
        assert server.stop() == 0
    lines = [line for line in log.read_text().splitlines() if "break-even" in line]
    assert len(lines) == times
    for line in lines:  # W1123 15:00:00.000000 1 model.py:1] "…"
        assert line.startswith("W") and "`dflash-trt diagnose BUNDLE --prompts FILE` says" in line
        assert "stays below break-even 12." in line

"""`tune`: what it writes, and who follows it; what it refuses is in tests/frozen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.bundle.bundle import attach_file, open_bundle, verify_bundle
from dflash_trt.decoding.drafter_kinds import PROMPT_LOOKUP
from dflash_trt.decoding.schedule import SCHEDULE_NAME, BlockSchedule, schedule_name
from dflash_trt.serving.server.repository import BUNDLE_FOLDER
from tests.cli.conftest import Run
from tests.decoding.schedules import invent_measurements

# The pair's drafts are right once a step after "a", and never after "0": see bigram.py.
QUICK = ["--max-tokens", "60", "--block-size", "2,4", "--batch", "1,4"]
PROMPTS = """{"prompt": "a"}
{"prompt": "bb"}
"""


@pytest.fixture(scope="module", autouse=True)
def _hurry() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_trt.decoding.tuning.block_times.STEPS_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a `tune` that takes no time: two prompts, two blocks, two batches."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text(PROMPTS)
    return [*QUICK, "--prompts", str(file)]


@pytest.fixture(scope="module")
def tuned(bundle: Path, quick: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the bundle with a schedule of its own."""
    from dflash_trt.cli.main import main

    folder = tmp_path_factory.mktemp("tuned") / "bundle"
    shutil.copytree(bundle, folder)
    assert main(["tune", str(folder), *quick]) == 0
    return folder


@pytest.fixture
def mine(tuned: Path, tmp_path: Path) -> Path:
    """A copy of that to change."""
    return shutil.copytree(tuned, tmp_path / "bundle")


def test_what_it_measures_and_writes(run: Run, tuned: Path) -> None:
    opened = open_bundle(tuned)
    assert f"{SCHEDULE_NAME}: sha256 matches" in verify_bundle(opened, lambda count: None)
    schedule = BlockSchedule.read(tuned / SCHEDULE_NAME)
    measured = schedule.measured
    assert measured is not None
    assert (schedule.executor, schedule.max_batch) == ("cpu", 4)
    assert (measured.prompts, measured.max_tokens, measured.block_sizes) == (2, 60, [2, 4])
    assert [step.batch for step in measured.steps] == [1, 4]
    # "abab…": every second draft "b" is right, and only where it is the first of its block.
    assert measured.acceptance == [[pytest.approx(1, abs=0.05)], [pytest.approx(1, abs=0.05), 0, 0]]
    assert measured.acceptance_lengths == pytest.approx([2.0, 2.0], abs=0.05)
    shown = run("inspect", tuned)
    assert shown.code == 0 and f"blocks  {schedule.describe()}" in shown.out
    assert run("inspect", tuned, "--json").json["block_schedule"] == schedule.to_json()


def test_sets_of_prompts(run: Run, bundle: Path, tmp_path: Path) -> None:
    """Each has its own line; the schedule is that of all of them together."""
    (tmp_path / "letters.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "digits.jsonl").write_text('{"prompt": "0"}\n{"prompt": "1"}\n')
    sets = [f"--prompts={tmp_path}/letters.jsonl", f"--prompts={tmp_path}/digits.jsonl"]
    elsewhere = ["-o", tmp_path / "schedule.json"]
    shown = run.well("tune", bundle, *QUICK, *sets, *elsewhere).out.splitlines()
    assert shown[0].startswith("acceptance length by block (3 prompts): 1.2")
    assert shown[1:3] == [
        "  letters (1): 1.97 at 2, 1.97 at 4",
        "  digits (2): 1.00 at 2, 1.00 at 4",
    ]
    assert [line for line in shown if line.startswith("looping: ")] == [
        "looping: 3 answers, which may inflate the figures above; alone: 1.20 at 2, 1.20 at 4"
    ]
    measured = run.well("tune", bundle, *QUICK, *sets, *elsewhere, "--json").json["schedule"][
        "measured"
    ]
    assert [(one["name"], one["answers"]) for one in measured["sets"]] == [
        ("letters", 1),
        ("digits", 2),
    ]
    both = sum(one["answers"] * 59 / one["acceptance_lengths"][0] for one in measured["sets"])
    assert measured["acceptance_lengths"][0] == pytest.approx(3 * 59 / both)


def _force(folder: Path, *blocks: int, **fields: Any) -> Path:
    """A file with the bundle's schedule, changed to `blocks` by batch.

    Its step times are invented, so that what live pacing makes of them is the same on any machine.
    """
    known = json.loads((folder / SCHEDULE_NAME).read_text())
    known["blocks"] = [
        {"max_batch": batch, "block_size": block} for batch, block in enumerate(blocks, start=1)
    ]
    invented = invent_measurements((2, 4), plain=0.1, feeding=0.1, batches=(1, 4))
    known["measured"] = invented.model_dump(exclude_none=True)
    path = folder.parent / "forced.json"
    path.write_text(json.dumps({**known, **fields}))
    return path


def test_generate_follows_it_unless_told_otherwise(run: Run, mine: Path) -> None:
    forced = _force(mine, 2, 2, 2, 2)
    attach_file(open_bundle(mine), SCHEDULE_NAME, forced.read_bytes())

    def drafted(*options: object) -> tuple[str, float]:
        answer = run.well("generate", mine, "--prompt", "a", "--max-tokens", 21, *options, "--json")
        result = answer.json
        return result["text"], round(result["drafted_tokens"] / result["steps"], 1)

    text, per_step = drafted()
    assert per_step == 1, "block 2 by the schedule"
    assert drafted("--block-schedule", "none") == (text, 7.0), "the trained block"
    assert drafted("--block-schedule", 4) == (text, 3.0), "a fixed block comes first"
    assert drafted("--drafter", "none") == (text, 0.0)
    other = _force(mine, 1, 1, 1, 1)
    assert drafted("--block-schedule", other) == (text, 0.0)


def test_every_drafter_has_its_own(run: Run, mine: Path, quick: list[str], tmp_path: Path) -> None:
    """Written beside the draft's, followed by `generate` and `package`, removed alone."""
    lookup = ["--drafter", PROMPT_LOOKUP]
    file = mine / schedule_name(PROMPT_LOOKUP)
    before = (mine / SCHEDULE_NAME).read_bytes()
    shown = run.well("tune", mine, *lookup, *quick).out
    assert "fed" not in shown and "TensorRT-LLM" not in shown
    assert shown.splitlines()[-1] == f"written to {file}"
    known = json.loads(file.read_text())
    assert known["drafter"] == PROMPT_LOOKUP
    assert (mine / SCHEDULE_NAME).read_bytes() == before
    known["blocks"] = [{"max_batch": 4, "block_size": 2}]
    del known["measured"]
    attach_file(open_bundle(mine), file.name, json.dumps(known).encode())
    assert "decodes (prompt lookup)\n" in run.well("inspect", mine).out
    answer = run.well("generate", mine, *lookup, "--prompt", "a", "--max-tokens", 21, "--json").json
    assert 0 < answer["drafted_tokens"] <= answer["steps"], "block 2 by the schedule"
    own = ["--block-schedule", mine / SCHEDULE_NAME]
    run("generate", mine, *lookup, "--prompt", "a", *own).fails(2, "is for DFlash drafts")
    run.well("package", mine, *lookup, "-o", tmp_path / "served")
    served = open_bundle(tmp_path / "served" / BUNDLE_FOLDER)
    assert (served.folder / file.name).read_bytes() == file.read_bytes()
    run.well("tune", mine, *lookup, "--remove")
    assert not file.exists() and (mine / SCHEDULE_NAME).read_bytes() == before


def test_it_can_be_removed(run: Run, mine: Path) -> None:
    removed = run("tune", mine, "--remove")
    assert (removed.code, removed.out) == (0, f"removed {mine / SCHEDULE_NAME}\n")
    opened = open_bundle(mine)
    assert SCHEDULE_NAME not in {file.path for file in opened.manifest.files}
    assert not (mine / SCHEDULE_NAME).exists()
    verify_bundle(opened, lambda count: None)


def test_package_takes_it_along(run: Run, mine: Path, tmp_path: Path) -> None:
    forced = _force(mine, 4, 4, 2, 1)
    for name, options, switch, blocks in (
        ("auto", [], "on", (mine / SCHEDULE_NAME).read_text()),
        ("none", ["--block-schedule", "none"], "off", (mine / SCHEDULE_NAME).read_text()),
        ("file", ["--block-schedule", forced], "on", forced.read_text()),
    ):
        folder = tmp_path / name
        run.well("package", mine, *options, "-o", folder)
        config = (folder / "tensorrt_llm" / "config.pbtxt").read_text()
        assert f'"block_schedule"  value: {{ string_value: "{switch}" }}' in config
        opened = open_bundle(folder / BUNDLE_FOLDER)
        assert json.loads((opened.folder / SCHEDULE_NAME).read_text()) == json.loads(blocks)
        verify_bundle(opened, lambda count: None)
    assert BlockSchedule.read(mine / SCHEDULE_NAME).blocks[0].block_size in (1, 2, 4)
    verify_bundle(open_bundle(mine), lambda count: None)

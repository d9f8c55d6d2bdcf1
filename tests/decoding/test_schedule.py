"""Block schedules: what their file holds, what is refused, and TensorRT-LLM's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.decoding.schedule import BlockSchedule, merge_ranges
from dflash_trt.errors import DflashError

PLAIN: dict[str, Any] = {
    "schema_version": 1,
    "blocks": [
        {"max_batch": 4, "block_size": 8},
        {"max_batch": 16, "block_size": 4},
        {"max_batch": 32, "block_size": 1},
    ],
    "executor": "cpu",
}
MEASURED: dict[str, Any] = {
    "prompts": 3,
    "max_tokens": 64,
    "threads": 1,
    "positions": 100,
    "block_sizes": [4, 8],
    "steps": [
        {"batch": 1, "target_only": 0.01, "target": 0.012, "blocks": [0.014, 0.02]},
        {"batch": 8, "target_only": 0.04, "target": 0.05, "blocks": [0.06, 0.09]},
    ],
    "prefill_seconds": 0.001,
    "acceptance": [[0.9] * 3, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]],
    "acceptance_lengths": [1.9, 3.1],
}


def read(folder: Path, fields: dict[str, Any]) -> BlockSchedule:
    path = folder / "block_schedule.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    return BlockSchedule.read(path)


def test_a_schedule_is_read_as_it_is_written(tmp_path: Path) -> None:
    old = {**PLAIN, "fallback": "target_only"}
    assert read(tmp_path, old).to_json() == PLAIN, "as it was written before"
    for fields in (PLAIN, {**PLAIN, "measured": MEASURED}):
        schedule = read(tmp_path, fields)
        assert read(tmp_path, schedule.to_json()) == schedule
        sizes = [schedule.block_size(batch) for batch in (1, 4, 5, 16, 17, 32, 99)]
        assert sizes == [8, 8, 4, 4, 1, 1, 1]
        assert (schedule.max_batch, schedule.largest_block) == (32, 8)


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([8, 8, 8, 8], {4: 7}),
        ([8, 8, 4, 1], {2: 7, 3: 3}),
        ([8, 1, 4, 4], {1: 7, 2: 0, 4: 3}),
        ([4, 8, 8, 2], {3: 3, 4: 1}),
        ([1, 8, 8], {}),
        ([1], {}),
    ],
)
def test_tensorrt_llm_s_form(blocks: list[int], expected: dict[int, int]) -> None:
    """Keys are the largest batch of each; none above the last; the first has the most drafts."""
    schedule = BlockSchedule(blocks=merge_ranges(blocks), executor="cpu")
    assert [schedule.block_size(n) for n in range(1, len(blocks) + 1)] == blocks
    drafts = schedule.draft_len_schedule()
    assert list(drafts.values()) == [drafts[key] for key in sorted(drafts)]
    # Neighbours that became equal by the cut are harmless; what counts is what each batch gets.
    get = {n: next((k for end, k in drafts.items() if n <= end), 0) for n in range(1, len(blocks))}
    want = {n: next((k for end, k in expected.items() if n <= end), 0) for n in get}
    assert get == want and max(drafts, default=0) == max(expected, default=0)


@pytest.mark.parametrize(
    ("change", "piece"),
    [
        ({"schema_version": 2}, "schema version 2"),
        ({"blocks": []}, "blocks"),
        ({"blocks": [{"max_batch": 4, "block_size": 0}]}, "block_size"),
        ({"blocks": [{"max_batch": 4, "block_size": 2.5}]}, "block_size"),
        ({"blocks": PLAIN["blocks"][::-1]}, "ascending"),
        ({"blocks": [{"max_batch": 4}]}, "block_size"),
        ({"surprise": 1}, "surprise"),
        ({"fallback": "draft"}, "fallback"),
        ({"measured": {**MEASURED, "block_sizes": [8, 4]}}, "ascend"),
        ({"measured": {**MEASURED, "block_sizes": [2, 4, 8]}}, "each of block_sizes"),
        ({"measured": {**MEASURED, "acceptance": [[0.9] * 3, [1.9] * 7]}}, "acceptance"),
        ({"measured": {**MEASURED, "acceptance": [[0.9], [0.9]]}}, "rates"),
        ({"measured": MEASURED, "blocks": [{"max_batch": 1, "block_size": 3}]}, "block 3"),
        ({"measured": {**MEASURED, "prefill_seconds": 0}}, "prefill_seconds"),
        ({"executor": None}, "executor"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], piece: str) -> None:
    with pytest.raises(DflashError, match=piece) as caught:
        read(tmp_path, PLAIN | change)
    assert caught.value.exit_code == 2 and "\n" not in caught.value.message

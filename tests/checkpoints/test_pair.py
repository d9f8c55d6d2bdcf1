"""Pairs: what fits, and everything that does not in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.pair import check_pair
from dflash_trt.checkpoints.target import read_target

MakeCheckpoint = Callable[..., Path]
Refused = Callable[..., Any]


def test_a_pair(make_target: MakeCheckpoint, make_draft: MakeCheckpoint) -> None:
    target, draft = read_target(make_target()), read_draft(make_draft())
    pair = check_pair(target, draft)
    assert (pair.target, pair.draft) == (target, draft)


def test_silent_configs_are_believed(
    make_target: MakeCheckpoint, make_draft: MakeCheckpoint
) -> None:
    draft = read_draft(make_draft(num_target_layers=..., vocab_size=...))
    check_pair(read_target(make_target()), draft)


@pytest.mark.parametrize(
    ("arguments", "piece"),
    [
        ({"taps": 4}, "fc takes 64 features, 3 tapped layers of 16 give 48"),
        ({"inner": {"target_layer_ids": [1, 6, 9]}}, "target_layer_ids 6, 9 are past the target"),
        ({"num_target_layers": 7}, "num_target_layers 7 is not the target's 6"),
        ({"inner": {"mask_token_id": 40}}, "mask_token_id 40 is outside the target's vocabulary"),
        ({"vocab_size": 41}, "vocab_size 41 is not the target's 40"),
    ],
)
def test_each_mismatch(
    make_target: MakeCheckpoint,
    make_draft: MakeCheckpoint,
    refused: Refused,
    arguments: dict[str, Any],
    piece: str,
) -> None:
    target, draft = read_target(make_target()), read_draft(make_draft(**arguments))
    with refused("draft does not fit the target", piece):
        check_pair(target, draft)


def test_all_mismatches_at_once(
    make_target: MakeCheckpoint, make_draft: MakeCheckpoint, refused: Refused
) -> None:
    target = read_target(make_target())
    draft = read_draft(
        make_draft(
            {"target_layer_ids": [1, 9], "mask_token_id": 99},
            shape_of={"hidden_size": 20},
            hidden_size=20,
            vocab_size=100,
            num_target_layers=10,
        )
    )
    with refused(
        "fc takes 60 features, 2 tapped layers of 16 give 32",
        "draft hidden_size 20 is not the target's 16, whose embedding and lm_head it borrows",
        "target_layer_ids 9 are past",
        "num_target_layers 10",
        "mask_token_id 99",
        "vocab_size 100",
        "pass the draft that was trained for this target",
    ):
        check_pair(target, draft)

"""Pairs: what fits, and everything that does not in one line."""

from __future__ import annotations

from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.pair import check_pair
from dflash_trt.checkpoints.target import read_target
from tests.checkpoints.conftest import MakeCheckpoint
from tests.checkpoints.helpers import refused


def test_a_pair(make_target: MakeCheckpoint, make_draft: MakeCheckpoint) -> None:
    target, draft = read_target(make_target()), read_draft(make_draft())
    pair = check_pair(target, draft)
    assert (pair.target, pair.draft) == (target, draft)
    check_pair(target, read_draft(make_draft(num_target_layers=..., vocab_size=...)))


def test_all_mismatches_at_once(make_target: MakeCheckpoint, make_draft: MakeCheckpoint) -> None:
    target = read_target(make_target())
    draft = read_draft(
        make_draft(
            {"target_layer_ids": [5, 6, 9], "mask_token_id": 40},
            shape_of={"hidden_size": 20},
            hidden_size=20,
            vocab_size=41,
            num_target_layers=7,
        )
    )
    with refused(
        "draft does not fit the target",
        "fc takes 60 features, 3 tapped layers of 16 give 48",
        "draft hidden_size 20 is not the target's 16, whose embedding and lm_head it borrows",
        "target_layer_ids 6, 9 are past the target's last layer (5)",
        "num_target_layers 7 is not the target's 6",
        "mask_token_id 40 is outside the target's vocabulary of 40",
        "vocab_size 41 is not the target's 40",
        "pass the draft that was trained for this target",
    ):
        check_pair(target, draft)

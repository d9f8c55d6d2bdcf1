"""Drafts in DeepSpec's layout: as published, and what of it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_trt.models.draft import read_draft
from dflash_trt.models.draft_tokens import write_draft_tokens
from dflash_trt.models.pair_check import check_pair
from dflash_trt.models.target import read_target
from tests.models.conftest import (
    DRAFT_CONFIG,
    MakeCheckpoint,
    draft_shapes,
    write_checkpoint,
)
from tests.models.helpers import refused

RANK = 6
DEEPSPEC: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "mask_token_id": 39,
    "target_layer_ids": [1, 2, 3],
    "num_anchors": 512,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
}
HEADS: dict[str, list[int]] = {
    "markov_head.markov_w1.weight": [40, RANK],
    "markov_head.markov_w2.weight": [40, RANK],
    "confidence_head.proj.weight": [1, 16 + RANK],
    "confidence_head.proj.bias": [1],
}


def write(folder: Path, target: Path, extra: dict[str, list[int]], **changes: Any) -> Path:
    """A tiny draft that repeats the matrices of `target`; the config takes `changes`."""
    config = {key: one for key, one in DRAFT_CONFIG.items() if key != "dflash_config"}
    write_checkpoint(folder, config | DEEPSPEC | changes, draft_shapes(DRAFT_CONFIG, 3) | extra)
    tensors, owned = (load_file(one / "model.safetensors") for one in (folder, target))
    tensors["embed_tokens.weight"] = owned["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = owned["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_what_is_read(make_target: MakeCheckpoint, tmp_path: Path) -> None:
    target = make_target()
    dspark = read_draft(write(tmp_path / "dspark", target, HEADS))
    assert (dspark.kind, dspark.block_size, dspark.anchor_drafts) == ("DSpark", 8, True)
    assert dspark.markov_rank == RANK and dspark.target_layer_ids == (1, 2, 3)
    check_pair(read_target(target), dspark)
    plain = write(tmp_path / "plain", target, {}, markov_rank=0, enable_confidence_head=False)
    assert (read_draft(plain).kind, read_draft(plain).anchor_drafts) == ("DFlash", True)


@pytest.mark.parametrize(
    ("changes", "piece"),
    [
        ({"markov_head_type": "gated"}, 'markov_head_type = "gated" is not supported'),
        ({"markov_rank": RANK + 1}, f'"markov_head.markov_w1.weight" is [40, {RANK}], not [40, 7]'),
        ({"markov_rank": ...}, "markov_rank is missing"),
        ({"block_size": 0}, "block_size is 0; it must be an integer from 1"),
        ({"gru_hidden_dim": 4}, "is a Domino drafter"),
    ],
)
def test_variants_are_refused(
    changes: dict[str, Any], piece: str, make_target: MakeCheckpoint, tmp_path: Path
) -> None:
    changes = {key: None if one is ... else one for key, one in changes.items()}
    folder = write(tmp_path / "draft", make_target(), HEADS, **changes)
    with refused(piece):
        read_draft(folder)


def test_matrices_of_another_target_are_refused(
    make_target: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = write(tmp_path / "draft", make_target(), HEADS)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + np.float32(1)
    save_file(tensors, folder / "model.safetensors")
    with refused("draft does not fit", "lm_head.weight differs from the target's"):
        check_pair(read_target(make_target()), read_draft(folder))
    write_draft_tokens([1, 2], folder)
    with refused("chooses among some tokens, which its Markov head does not know"):
        read_draft(folder)

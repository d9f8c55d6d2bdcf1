"""Drafts: z-lab's contract in its variants, its relatives refused by name; pairs that fit.

tests/frozen has the other refusals of configs.
"""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt.models.draft import default_target_layer_ids, read_draft
from dflash_trt.models.pair_check import check_pair
from dflash_trt.models.target import read_target
from tests.models.conftest import MakeCheckpoint
from tests.models.helpers import refused

FULL, SLIDING = "full_attention", "sliding_attention"
ONE_SLIDES = {"layer_types": [SLIDING, FULL], "sliding_window": 9}
SWA = {"use_swa": True, "swa_window_size": 7}


def test_contract(make_draft: MakeCheckpoint) -> None:
    draft = read_draft(make_draft(dtype="BF16"))
    assert (draft.block_size, draft.mask_token_id) == (8, 39)
    assert (draft.target_layer_ids, draft.num_target_layers) == ((1, 2, 3), 6)
    assert (draft.num_layers, draft.head_dim, draft.vocab_size) == (2, 8, 40)
    assert draft.layer_windows == (None, None)
    assert draft.layer_causal == (False, False)
    assert draft.fc_input_size == 48
    assert draft.weights["layers.1.q_norm"].name == "layers.1.self_attn.q_norm.weight"
    assert len(draft.weights) == 3 + 2 * 11
    assert all(entry.dtype == "BF16" for entry in draft.weights.values())


def test_everything_at_the_top_level(make_draft: MakeCheckpoint) -> None:
    draft = read_draft(
        make_draft(
            {"mask_token_id": ..., "target_layer_ids": ...},
            mask_token_id=5,
            target_layer_ids=[4, 0, 2],
            num_target_layers=...,
            vocab_size=...,
            block_size=...,  # z-lab's is 16
        )
    )
    assert (draft.mask_token_id, draft.target_layer_ids) == (5, (4, 0, 2))
    assert draft.block_size == 16
    assert (draft.num_target_layers, draft.vocab_size) == (None, None)


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 8, (1, 10, 18, 27, 35, 44, 52, 61)),
        (36, 1, (18,)),
        (7, 3, (1, 2, 4)),  # 2.5 rounds to 2
    ],
)
def test_default_target_layer_ids(
    target_layers: int, draft_layers: int, ids: tuple[int, ...]
) -> None:
    """The ids that published drafts state, and by hand: one layer, a tie rounded to even."""
    assert default_target_layer_ids(target_layers, draft_layers) == ids


def test_absent_target_layer_ids(make_target: MakeCheckpoint, make_draft: MakeCheckpoint) -> None:
    target = read_target(make_target())
    absent = {"target_layer_ids": ...}
    draft = read_draft(make_draft(absent, taps=2, num_target_layers=12))
    assert draft.target_layer_ids == (1, 9) and draft.taps_by_rule
    with refused("num_target_layers 12 is not the target's 6", "or `build` --target-layer-ids"):
        check_pair(target, draft)
    folder = make_draft(absent, taps=2, num_target_layers=2)
    with refused("default tapped layers of a 2-layer target are [1, -1]", "--target-layer-ids"):
        read_draft(folder)
    draft = check_pair(target, read_draft(folder, (4, 2))).draft  # whatever the rule would be
    assert draft.target_layer_ids == (4, 2) and not draft.taps_by_rule
    with refused("--target-layer-ids: the draft takes layers 1, 2, 3", "leave it out"):
        read_draft(make_draft(), (4, 2))


def test_vocabularies_may_be_padded(
    make_target: MakeCheckpoint, make_draft: MakeCheckpoint
) -> None:
    """As MiMo's: nothing of the vocabulary is the draft's."""
    target = read_target(make_target({"vocab_size": 152_576}, vocab_size=152_576))
    assert check_pair(target, read_draft(make_draft(vocab_size=152_064))).target is target
    with refused("vocab_size 150000 is not the target's 152576"):
        check_pair(target, read_draft(make_draft(vocab_size=150_000)))


@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({**ONE_SLIDES, "layer_types": [FULL, FULL]}, (None, None), (False, False)),
        (ONE_SLIDES, (9, None), (True, False)),
        ({**ONE_SLIDES, "inner": {"causal": False}}, (9, None), (False, False)),
        (
            {**ONE_SLIDES, "layer_types": [SLIDING] * 2, "is_causal": False},
            (9, 9),
            (False, False),
        ),
        ({"layer_types": [FULL, FULL], "inner": SWA}, (7, 7), (False, False)),
        ({"inner": SWA}, (7, 7), (False, False)),
        ({"sliding_window": 6, "inner": {"use_swa": True}}, (6, 6), (False, False)),
        (
            {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
            (None, 6),
            (False, True),
        ),
        ({"sliding_window": 6, "use_sliding_window": False}, (None, None), (False, False)),
    ],
)
def test_sliding_layers(
    make_draft: MakeCheckpoint,
    changes: dict[str, Any],
    windows: tuple[int | None, ...],
    causal: tuple[bool, ...],
) -> None:
    draft = read_draft(make_draft(**changes))
    assert (draft.layer_windows, draft.layer_causal) == (windows, causal)


@pytest.mark.parametrize(
    ("changes", "piece"),
    [
        ({"inner": {"target_layer_ids": [1, 2.0]}}, "must hold integers from 0"),
        ({"inner": 3}, "dflash_config is 3; it must be an object"),
        ({"is_causal": True}, "is_causal = true is not supported"),
        ({"selector_rank": 8}, 'its "architectures" must be ["DFlash2DraftModel"]'),
        ({"add_swa_attention_sink_bias": True}, "attention sinks cannot be run yet"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "gpt-oss's experts only"),
    ],
)
def test_config_errors(make_draft: MakeCheckpoint, changes: dict[str, Any], piece: str) -> None:
    with refused("config.json", piece):
        read_draft(make_draft(**changes))


@pytest.mark.parametrize(
    ("arguments", "name", "evidence"),
    [
        *(
            ({"architectures": [one]}, name, f'architecture "{one}"')
            for one, name in (("DSpark2DraftModel", "DSpark"), ("PEagleDraftModel", "PEagle"))
        ),
        *(
            ({"extra": {one: [2]}}, name, f'tensor "{one}"')
            for one, name in (("prefix_gru.weight_ih_l0", "Domino"), ("d2t", "EAGLE"))
        ),
        ({"inner": {"projector_type": "dspark"}}, "DSpark", 'projector_type "dspark"'),
        (
            {"inner": {"projector_type": "domino", "selector_rank": 8}},
            "Domino",
            'projector_type "domino"',
        ),
        ({"medusa_num_heads": 4}, "Medusa", 'config key "medusa_num_heads"'),
        ({"pard_token": 9}, "PARD", 'config key "pard_token"'),
    ],
)
def test_relatives(
    make_draft: MakeCheckpoint, arguments: dict[str, Any], name: str, evidence: str
) -> None:
    folder, article = make_draft(**arguments), "an" if name == "EAGLE" else "a"
    if "extra" not in arguments:
        # A relative is named before its weights are looked at: EAGLE's are often pickles.
        (folder / "model.safetensors").unlink()
    with refused(f"is {article} {name} drafter ({evidence}), which is not supported"):
        read_draft(folder)


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, None),
        ({"input_embedding_scale": 0.5}, 0.5),
        ({"inner": {"input_embedding_scale": 3, "output_multiplier": 0.25}}, 3.0),
    ],
)
def test_a_scale_of_its_own(
    make_draft: MakeCheckpoint, changes: dict[str, Any], scale: float | None
) -> None:
    """At either level, as z-lab reads it; a multiplier of logits changes no argmax."""
    assert read_draft(make_draft(**changes)).own_embedding_scale == scale
    with refused("dflash_config.input_embedding_scale is 2.0; it must equal the top level's 4"):
        read_draft(make_draft({"input_embedding_scale": 2.0}, input_embedding_scale=4))
    with refused("output_multiplier is -1; it must be a number above 0"):
        read_draft(make_draft(output_multiplier=-1))


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

"""Drafts in DeepSpec's and speculators' layouts, EAGLE-3 heads: as published, and refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_trt.core.formats import Format
from dflash_trt.models.dflash2 import Dflash2Sizes
from dflash_trt.models.draft import read_draft
from dflash_trt.models.draft_tokens import write_draft_tokens
from dflash_trt.models.pair_check import check_pair
from dflash_trt.models.rope import YarnScaling
from dflash_trt.models.target import read_target
from dflash_trt.quantization.linears import QuantizeOptions, select_linears
from tests.models.conftest import (
    DRAFT_CONFIG,
    SIZES,
    MakeCheckpoint,
    draft_shapes,
    layer_shapes,
    write_checkpoint,
)
from tests.models.helpers import refused
from tests.reference.deepspec import write_speculators

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


def write_dspark(folder: Path, target: Path, extra: dict[str, list[int]], **changes: Any) -> Path:
    """A tiny draft that repeats the matrices of `target`; the config takes `changes`."""
    config = {key: one for key, one in DRAFT_CONFIG.items() if key != "dflash_config"}
    write_checkpoint(folder, config | DEEPSPEC | changes, draft_shapes(DRAFT_CONFIG, 3) | extra)
    tensors, owned = (load_file(one / "model.safetensors") for one in (folder, target))
    tensors["embed_tokens.weight"] = owned["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = owned["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_what_is_read_of_deepspec(make_target: MakeCheckpoint, tmp_path: Path) -> None:
    target = make_target()
    dspark = read_draft(write_dspark(tmp_path / "dspark", target, HEADS))
    assert (dspark.kind, dspark.block_size, dspark.anchor_drafts) == ("DSpark", 8, True)
    assert dspark.markov_rank == RANK and dspark.target_layer_ids == (1, 2, 3)
    check_pair(read_target(target), dspark)
    plain = write_dspark(
        tmp_path / "plain", target, {}, markov_rank=0, enable_confidence_head=False
    )
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
def test_variants_of_deepspec_are_refused(
    changes: dict[str, Any], piece: str, make_target: MakeCheckpoint, tmp_path: Path
) -> None:
    changes = {key: None if one is ... else one for key, one in changes.items()}
    folder = write_dspark(tmp_path / "draft", make_target(), HEADS, **changes)
    with refused(piece):
        read_draft(folder)


KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
DFLASH2: dict[str, Any] = dict(zip(KEYS, (2, 4, 6, 8), strict=True))
ADDITIONS: dict[str, list[int]] = {
    **{
        f"layers.{i}.{one}_conv.{name}": shape
        for i in (0, 1)
        for one in ("attention", "mlp")
        for name, shape in (("base_kernel", [2, 2, 16]), ("kernel_projection.weight", [16, 16]))
    },
    "candidate_selector.predecessor_codebook": [40, 6],
    "candidate_selector.successor_codebook": [40, 6],
    "candidate_selector.hidden_projection.weight": [6, 16],
}
TWO = {"architectures": ["DFlash2DraftModel"]}


@pytest.mark.parametrize(
    "changes",
    [
        {"inner": DFLASH2, **TWO},
        {"inner": {"selector_top_k": 8}, **DFLASH2, **TWO},
        {"inner": DFLASH2 | {"projector_type": "dflash2"}},
    ],
    ids=["z-lab", "partly at the top level", "ModelOpt"],
)
def test_what_is_read_of_dflash2(changes: dict[str, Any], make_draft: MakeCheckpoint) -> None:
    changes = {"output_multiplier": 0.5, "final_logit_softcapping": 30, **changes}
    draft = read_draft(make_draft(extra=ADDITIONS, **changes))
    assert (draft.kind, draft.block_size, draft.anchor_drafts) == ("DFlash 2", 8, False)
    assert draft.dflash2 == Dflash2Sizes(group=4, rank=6, top_k=8)
    assert (draft.logit_multiplier, draft.logit_cap) == (0.5, 30)
    assert len(draft.weights) == 3 + 2 * 11 + 2 * 4 + 3
    chosen = select_linears(draft, QuantizeOptions(Format.FP8))
    assert len(chosen.linears) == 2 * 7 and len(chosen.kept) == 2 * 2 + 2, "fc, and what gates"


@pytest.mark.parametrize(
    ("inner", "piece"),
    [
        ({"conv_kernel_size": 3}, "conv_kernel_size = 3 is not supported; convolutions of 2 taps"),
        ({"conv_group_size": 5}, "conv_group_size is 5; it must divide hidden_size (16)"),
        ({"conv_group_size": 8}, '"layers.0.attention_conv.kernel_projection.weight" is [16, 16]'),
        ({"selector_top_k": 41}, "selector_top_k is 41; it must be an integer from 1 to 40"),
        ({"selector_rank": 7}, "selector_rank is 7; it must equal the top level's 6"),
        ({"selector_top_k": ...}, "selector_top_k is missing"),
        ({"projector_type": "domino"}, "is a Domino drafter"),
        ({"selector_temperature": 2}, "dflash_config.selector_temperature = 2 is not supported"),
    ],
)
def test_variants_of_dflash2_are_refused(
    inner: dict[str, Any], piece: str, make_draft: MakeCheckpoint
) -> None:
    with refused(piece):
        read_draft(make_draft(DFLASH2 | inner, extra=ADDITIONS, selector_rank=6, **TWO))


def test_matrices_of_another_target_are_refused(
    make_target: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = write_dspark(tmp_path / "draft", make_target(), HEADS)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + np.float32(1)
    save_file(tensors, folder / "model.safetensors")
    with refused("draft does not fit", "lm_head.weight differs from the target's"):
        check_pair(read_target(make_target()), read_draft(folder))
    write_draft_tokens([1, 2], folder)
    with refused("chooses among some tokens, which its Markov head does not know"):
        read_draft(folder)


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 24,
    **SIZES,
}


def shapes(draft_vocab: int, taps: int) -> dict[str, list[int]]:
    """Names and shapes of a head, written out independently of the name maps."""
    hidden = SIZES["hidden_size"]
    layer = layer_shapes(CONFIG, "", qk_norm=False) | {"layers.0.hidden_norm.weight": [hidden]}
    for name in layer:
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            layer[name] = [layer[name][0], 2 * hidden]
    return {name.replace("layers.0", "midlayer"): shape for name, shape in layer.items()} | {
        "fc.weight": [hidden, taps * hidden],
        "lm_head.weight": [draft_vocab, hidden],
        "norm.weight": [hidden],
    }


def write(folder: Path, offsets: Any = range(16), taps: int = 3, **changes: Any) -> Path:
    """A tiny head; d2t spreads its 24 tokens by `offsets`, the rest by none."""
    config = {key: one for key, one in (CONFIG | changes).items() if one is not None}
    write_checkpoint(folder, config, shapes(24, taps))
    if offsets is not None:
        tensors = load_file(folder / "model.safetensors")
        offsets = np.array(list(offsets), np.int64)
        # The last ones keep the distance of the last that is given.
        d2t = np.concatenate([offsets, np.full(24 - len(offsets), offsets[-1])])
        tensors |= {"d2t": d2t, "t2d": np.zeros(40, np.bool_)}
        save_file(tensors, folder / "model.safetensors")
    return folder


def test_what_is_read(make_target: MakeCheckpoint, tmp_path: Path) -> None:
    draft = read_draft(write(tmp_path / "draft"))
    assert (draft.kind, draft.block_size, draft.num_layers) == ("EAGLE-3", 8, 1)
    assert draft.token_ids is not None and draft.token_ids[:4] == (0, 2, 4, 6)
    assert draft.token_ids[-1] == 23 + 15 and draft.rope.theta == 10_000
    pair = check_pair(read_target(make_target()), draft)
    assert pair.draft.target_layer_ids == (1, 2, 2), "of six layers"
    named = {"eagle_aux_hidden_state_layer_ids": [0, 4], "use_aux_hidden_state": True}
    draft = read_draft(write(tmp_path / "two", taps=2, eagle_config=named))
    assert check_pair(pair.target, draft).draft.target_layer_ids == (0, 4)


@pytest.mark.parametrize(
    ("changes", "piece"),
    [
        ({"num_hidden_layers": 2}, "heads of one layer are"),
        ({"norm_output": True}, "servers hand the normed output to the next step, SpecForge up"),
        ({"norm_output": False}, "trains such a head without the norm before lm_head, all others"),
        ({"fc_norm": True, "norm_before_fc": True}, "norm_before_fc is true as well"),
        ({"layer_types": ["sliding_attention"]}, "heads that see everything before them are"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-3 takes three layers"),
        ({"target_hidden_size": 32}, "heads as wide as their target are"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "heads as trained are"),
        ({"draft_vocab_size": 41}, "draft_vocab_size is 41; it must be an integer from 1 to 40"),
        ({"offsets": None}, "has no d2t, which says what its 24 tokens are of 40"),
        ({"offsets": [0, 39]}, "d2t moves token 1 by 39, outside a vocabulary of 40"),
        ({"offsets": [-(2**63), 0]}, "d2t moves token 0 by -9223372036854775808, outside"),
        ({"offsets": [1, 0]}, "d2t names a token twice"),
        ({"pard_token": 3}, "is a PARD drafter"),
    ],
)
def test_variants_are_refused(changes: dict[str, Any], piece: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "draft", **changes)
    with refused(piece):
        read_draft(folder)


NESTED: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 1, **SIZES}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "transformer_layer_config": NESTED,
    "pure_draft_prefix_len": 2,
}
OTHER_LAYER = {"transformer_layer_config": NESTED | {"model_type": "qwen3_next"}}


@pytest.mark.parametrize(
    ("changes", "piece"),
    [
        ({"speculators_model_type": "dflash3"}, '(speculators_model_type "dflash3"), which is'),
        ({"speculators_model_type": "peagle"}, "is a draft in speculators' layout"),
        ({"aux_hidden_state_layer_ids": [0, 2, 4]}, "0 is the embedding"),
        (OTHER_LAYER, 'model_type = "qwen3_next" is not supported; llama and qwen3 layers are'),
        ({"norm_before_fc": True}, '1 missing ("input_norm.weight")'),
    ],
)
def test_speculators_say_what_they_are(changes: dict[str, Any], piece: str, tmp_path: Path) -> None:
    """By their own key alone: a config of theirs has keys of other kinds too."""
    draft = read_draft(
        write(tmp_path / "draft", **SPECULATORS, aux_hidden_state_layer_ids=[1, 3, 6])
    )
    assert (draft.kind, draft.target_layer_ids) == ("EAGLE-3", (0, 2, 5))
    with refused(piece):
        read_draft(write(tmp_path / "other", **SPECULATORS | changes))


@pytest.fixture
def speculator(make_target: MakeCheckpoint, make_draft: MakeCheckpoint, tmp_path: Path) -> Any:
    """As RedHatAI/Qwen3-8B-speculator.dflash, at tiny sizes."""
    types = ["sliding_attention", "full_attention"]
    source = make_draft(layer_types=types, sliding_window=16), make_target()
    return partial(write_speculators, tmp_path / "speculator", *source, tokens=range(0, 40, 2))


def test_what_is_read_of_speculators(speculator: Any, make_target: MakeCheckpoint) -> None:
    draft, target = read_draft(speculator()), read_target(make_target())
    assert (draft.kind, draft.block_size, draft.anchor_drafts) == ("DFlash", 8, False)
    assert (draft.target_layer_ids, draft.mask_token_id) == ((1, 2, 3), 39)
    assert (draft.layer_windows, draft.layer_causal) == ((16, None), (True, False))
    assert draft.token_ids == tuple(range(0, 40, 2)) and not draft.norms_last_tap
    assert check_pair(target, draft).draft.owned == ("lm_head",)
    tensors = load_file(file := draft.checkpoint.path / "model.safetensors")
    tensors["embed_tokens.weight"][39] += 1  # the mask's row alone makes it another matrix
    save_file(tensors, file)
    assert "embed_tokens" in check_pair(target, read_draft(file.parent)).draft.owned
    draft = read_draft(speculator(kind="dspark", markov_rank=0, sample_from_anchor=...))
    assert (draft.kind, draft.block_size, draft.anchor_drafts) == ("DFlash", 9, True)


@pytest.mark.parametrize(
    ("changes", "piece"),
    [
        ({"projector_type": "domino"}, 'projector_type = "domino" is not supported'),
        ({"speculators_model_type": "domino"}, '(speculators_model_type "domino"), which is'),
        ({"target_hidden_size": 32}, "drafts as wide as their target are"),
        ({"aux_hidden_state_layer_ids": [0, 2, 4]}, "0 is the embedding"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"draft_vocab_size": 25}, '"lm_head.weight" is [20, 16], not [25, 16]'),
        ({"own": None}, '1 missing ("lm_head.weight")'),
        ({"kind": "dspark", "markov_rank": ...}, "markov_rank is missing"),
    ],
)
def test_variants_of_speculators_are_refused(
    changes: dict[str, Any], piece: str, speculator: Any
) -> None:
    with refused(piece):
        read_draft(speculator(**changes))


@pytest.mark.parametrize(
    ("scales", "specforge", "transformers"),
    [
        ((0.707, 1.0), 0.9495609, 0.9495609),
        ((1.0, 0.0), 1.2079442, 1.2079442),
        ((0.5, 0.0), 1.1039721, 1.2079442),
        ((0.0, 1.0), 0.8278528, 1.2079442),
    ],
)
def test_yarn_of_each_writer(
    scales: tuple[float, float], specforge: float, transformers: float, tmp_path: Path
) -> None:
    """What YaRN multiplies by: 0 is a value for SpecForge, and none for transformers."""
    own, every = scales
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    yarn |= {"mscale": own, "mscale_all_dim": every, "beta_fast": 32, "beta_slow": 1}
    nested = SPECULATORS | {"transformer_layer_config": NESTED | {"rope_parameters": yarn}}
    heads = write(tmp_path / "own", rope_scaling=yarn), write(tmp_path / "theirs", **nested)
    for folder, expected in zip(heads, (specforge, transformers), strict=True):
        scaling = read_draft(folder).rope.scaling
        assert isinstance(scaling, YarnScaling)
        assert scaling.attention_factor == pytest.approx(expected, abs=1e-6)


def test_heads_of_another_target(make_target: MakeCheckpoint, tmp_path: Path) -> None:
    target = read_target(make_target())
    folder = write(tmp_path / "four", taps=4)
    with refused("fc takes 64 features, 3 tapped layers of 16 give 48"):
        check_pair(target, read_draft(folder))
    folder = write(tmp_path / "other", vocab_size=41)
    with refused("vocab_size 41 is not the target's 40"):
        check_pair(target, read_draft(folder))
    named = {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}
    with refused("target_layer_ids 9 are past the target's last layer (5)"):
        check_pair(target, read_draft(write(tmp_path / "deep", eagle_config=named)))
    tensors = load_file(write(tmp_path / "own") / "model.safetensors")
    tensors["embed_tokens.weight"] = np.ones((40, 16), np.float32)
    save_file(tensors, tmp_path / "own" / "model.safetensors")
    with refused("embed_tokens.weight differs from the target's"):
        check_pair(target, read_draft(tmp_path / "own"))

"""Targets: families, dtypes, tied heads, biases; each kind of error by its message.

tests/frozen has the other refusals of configs.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.models.target import read_target
from tests.models.conftest import MakeCheckpoint
from tests.models.helpers import edit_tensors, refused

LLAMA = {"architectures": ["LlamaForCausalLM"]}
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(("dtype", "shards"), [("F32", 1), ("F16", 3)])
def test_qwen3(make_target: MakeCheckpoint, dtype: str, shards: int) -> None:
    target = read_target(make_target(dtype=dtype, shards=shards))
    assert (target.family, target.qk_norm, target.attention_bias) == ("qwen3", True, False)
    sizes = target.sizes
    assert (len(sizes.layers), sizes.layer.heads, sizes.layer.kv_heads) == (6, 4, 2)
    assert (sizes.hidden_size, sizes.layer.head_dim, sizes.intermediate_size) == (16, 8, 24)
    assert (target.vocab_size, target.max_position_embeddings) == (40, 128)
    assert target.weights["layers.5.q_norm"].name == "model.layers.5.self_attn.q_norm.weight"
    assert target.weights["layers.0.k_proj"].shape == (16, 16)
    assert target.weights["lm_head"].dtype == dtype
    assert len(target.weights) == 3 + 6 * 11
    assert set(target.weights.values()) == set(target.checkpoint.tensors.values())


def test_llama_with_default_head_size(make_target: MakeCheckpoint) -> None:
    changes = {**LLAMA, "head_dim": ..., "tie_word_embeddings": ...}
    target = read_target(make_target(shape_of=changes, **changes))
    assert (target.family, target.qk_norm, target.head_dim) == ("llama", False, 4)
    assert "layers.0.q_norm" not in target.weights
    assert len(target.weights) == 3 + 6 * 9


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_attention_bias(make_target: MakeCheckpoint, architecture: str) -> None:
    changes = {"architectures": [architecture], "attention_bias": True}
    weights = read_target(make_target(shape_of=changes, **changes)).weights
    for role, shape in (("k_proj", (16,)), ("o_proj", (16,)), ("q_proj", (32,))):
        assert weights[f"layers.3.{role}.bias"].shape == shape


def test_tied_embeddings(make_target: MakeCheckpoint) -> None:
    target = read_target(make_target(shape_of=TIED, **TIED))
    assert target.tie_word_embeddings
    assert "lm_head" not in target.weights

    folder = make_target(**TIED)
    with refused("tie_word_embeddings is true, but lm_head.weight differs"):
        read_target(folder)
    file = folder / "model.safetensors"
    edit_tensors(file, {"lm_head.weight": load_file(file)["model.embed_tokens.weight"]})
    assert "lm_head" not in read_target(folder).weights


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (3, None, (3,)),
        ([3, 4], None, (3, 4)),
        (None, None, ()),
        (3, {"eos_token_id": [7, 8]}, (7, 8)),
        ([1, 5], {"eos_token_id": [1, 5, 9]}, (1, 5, 9)),
        (3, {"temperature": 0.6}, (3,)),
    ],
)
def test_eos_token_ids(
    make_target: MakeCheckpoint, config: Any, generation: Any, ids: tuple[int, ...]
) -> None:
    folder = make_target(eos_token_id=config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert read_target(folder).eos_token_ids == ids


@pytest.mark.parametrize(
    ("changes", "piece"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "is a DFlash draft (DFlashDraftModel), not a"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu" is not supported'),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias = true is not supported"),
        ({"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        ({"hidden_size": 16.0}, "hidden_size is 16.0; it must be an integer from 1 to 16777216"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a number above 0"),
        ({"eos_token_id": []}, "must be a list of 1 to 256 integers"),
    ],
)
def test_config_errors(make_target: MakeCheckpoint, changes: dict[str, Any], piece: str) -> None:
    with refused("config.json", piece):
        read_target(make_target(**changes))


@pytest.mark.parametrize(
    ("shapes", "pieces"),
    [
        (
            {
                "shape_of": {"num_hidden_layers": 5},
                "extra": {"model.layers.0.self_attn.sinks": [4], "model.norm.weight": [17]},
            },
            (
                "11 missing (",
                '"model.layers.5.input_layernorm.weight"',
                "and 7 more",
                '1 unexpected ("model.layers.0.self_attn.sinks")',
                '1 wrong shape ("model.norm.weight" is [17], not [16])',
                "same checkpoint",
            ),
        ),
        (
            {"shape_of": {"vocab_size": 48}},
            ('2 wrong shape ("model.embed_tokens.weight" is [48, 16], not [40, 16]',),
        ),
        ({"shape_of": TIED}, ('1 missing ("lm_head.weight")',)),
    ],
)
def test_weights_that_do_not_fit(
    make_target: MakeCheckpoint, shapes: dict[str, Any], pieces: tuple[str, ...]
) -> None:
    with refused(*pieces):
        read_target(make_target(**shapes))


def test_dtypes(make_target: MakeCheckpoint) -> None:
    file = make_target() / "model.safetensors"
    edit_tensors(file, {"model.norm.weight": load_file(file)["model.norm.weight"].half()})
    assert read_target(file.parent).weights["norm"].dtype == "F16"
    edit_tensors(file, {"model.layers.1.mlp.up_proj.weight": torch.zeros(24, 16).char()})
    with refused("mlp.up_proj.weight", "dtype I8 is not supported", "supported are ModelOpt"):
        read_target(file.parent)

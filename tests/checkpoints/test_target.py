"""Targets: families, dtypes, tied heads, biases; every config and weight error by its message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_trt.checkpoints.target import read_target

MakeCheckpoint = Callable[..., Path]
Refused = Callable[..., Any]

LLAMA = {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_qwen3(make_target: MakeCheckpoint, dtype: str, shards: int) -> None:
    target = read_target(make_target(dtype=dtype, shards=shards))
    assert (target.family, target.qk_norm, target.attention_bias) == ("qwen3", True, False)
    assert (target.num_layers, target.sizes.layer.heads, target.sizes.layer.kv_heads) == (6, 4, 2)
    assert (target.hidden_size, target.head_dim, target.sizes.intermediate_size) == (16, 8, 24)
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


def test_qwen3_default_head_size_is_128(make_target: MakeCheckpoint) -> None:
    target = read_target(make_target(shape_of={"head_dim": 128}, head_dim=...))
    assert target.head_dim == 128


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_attention_bias(make_target: MakeCheckpoint, architecture: str) -> None:
    changes = {"architectures": [architecture], "attention_bias": True}
    target = read_target(make_target(shape_of=changes, **changes))
    assert target.weights["layers.3.k_proj.bias"].shape == (16,)
    assert target.weights["layers.3.o_proj.bias"].shape == (16,)
    assert target.weights["layers.3.q_proj.bias"].shape == (32,)


def test_tied_embeddings(make_target: MakeCheckpoint, refused: Refused) -> None:
    tied = {"tie_word_embeddings": True}
    target = read_target(make_target(shape_of=tied, **tied))
    assert target.tie_word_embeddings
    assert "lm_head" not in target.weights

    folder = make_target(**tied)
    path = folder / "model.safetensors"
    arrays = load_file(path)
    with refused("tie_word_embeddings is true, but lm_head.weight differs"):
        read_target(folder)
    save_file({**arrays, "lm_head.weight": arrays["model.embed_tokens.weight"]}, path)
    assert "lm_head" not in read_target(folder).weights


def test_saved_rotary_buffers_are_ignored(make_target: MakeCheckpoint) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    target = read_target(make_target(extra={name: [4]}))
    assert name not in {entry.name for entry in target.weights.values()}


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (3, None, (3,)),
        ([3, 4], None, (3, 4)),
        (None, None, ()),
        (3, {"eos_token_id": [7, 8]}, (7, 8)),
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
        (
            {"architectures": ["MambaForCausalLM"]},
            '"MambaForCausalLM" is not supported as a target',
        ),
        ({"architectures": ["X"]}, "supported are Qwen3ForCausalLM, LlamaForCausalLM"),
        ({"architectures": ["DFlashDraftModel"]}, "is a DFlash draft (DFlashDraftModel), not a"),
        ({"architectures": ...}, "architectures is null"),
        ({"architectures": "Qwen3ForCausalLM"}, "must be a list of one architecture name"),
        ({"quantization_config": {"quant_method": "fp8"}}, 'quant_method = "fp8" is not'),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu" is not supported'),
        ({"use_sliding_window": True}, "use_sliding_window = true is not supported"),
        ({"layer_types": ["sliding_attention"]}, "layers must all be full_attention"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias = true is not supported"),
        ({"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"vocab_size": "40"}, 'vocab_size is "40"; it must be an integer'),
        ({"hidden_size": 16.0}, "hidden_size is 16.0; it must be an integer"),
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 2**30}, "integer from 1 to 1024"),
        ({"num_hidden_layers": True}, "num_hidden_layers is true"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads (3)"),
        ({"head_dim": 7}, "head_dim is 7; it must be even for RoPE"),
        ({**LLAMA, "head_dim": ..., "hidden_size": 18}, "must be a multiple of num_attention_hea"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": "tiny"}, "must be a number"),
        ({"rope_scaling": {"type": "dynamic"}}, '"dynamic" is not supported'),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id is"),
        ({"eos_token_id": []}, "must be a list of 1 to 256 integers"),
    ],
)
def test_config_errors(
    make_target: MakeCheckpoint, refused: Refused, changes: dict[str, Any], piece: str
) -> None:
    with refused("config.json", piece):
        read_target(make_target(**changes))


def test_nan_is_named(make_target: MakeCheckpoint, refused: Refused) -> None:
    with refused("config.json", '"rms_norm_eps" is NaN'):
        read_target(make_target(rms_norm_eps=float("nan")))


def test_weights_that_do_not_fit(make_target: MakeCheckpoint, refused: Refused) -> None:
    folder = make_target(
        shape_of={"num_hidden_layers": 5},
        extra={"model.layers.0.self_attn.sinks": [4], "model.norm.weight": [17]},
    )
    with refused(
        "11 missing (",
        '"model.layers.5.input_layernorm.weight"',
        "and 7 more",
        '1 unexpected ("model.layers.0.self_attn.sinks")',
        '1 wrong shape ("model.norm.weight" is [17], not [16])',
        "same checkpoint",
    ):
        read_target(folder)


def test_vocabulary_padding_is_a_wrong_shape(make_target: MakeCheckpoint, refused: Refused) -> None:
    with refused('2 wrong shape ("model.embed_tokens.weight" is [48, 16], not [40, 16]'):
        read_target(make_target(shape_of={"vocab_size": 48}))


def test_untied_head_missing(make_target: MakeCheckpoint, refused: Refused) -> None:
    with refused('1 missing ("lm_head.weight")'):
        read_target(make_target(shape_of={"tie_word_embeddings": True}))


def test_rank_matters(make_target: MakeCheckpoint, refused: Refused) -> None:
    with refused('"model.norm.weight" is [16, 1], not [16]'):
        read_target(make_target(extra={"model.norm.weight": [16, 1]}))


def test_quantized_weights(make_target: MakeCheckpoint, refused: Refused) -> None:
    folder = make_target()
    path = folder / "model.safetensors"
    arrays = load_file(path)
    arrays["model.layers.1.mlp.up_proj.weight"] = np.zeros((24, 16), dtype=np.int8)
    save_file(arrays, path)
    with refused("mlp.up_proj.weight", "dtype I8 is not supported", "supported are ModelOpt"):
        read_target(folder)


def test_mixed_float_dtypes_are_fine(make_target: MakeCheckpoint) -> None:
    folder = make_target()
    path = folder / "model.safetensors"
    arrays = load_file(path)
    arrays["model.norm.weight"] = arrays["model.norm.weight"].astype(np.float16)
    save_file(arrays, path)
    assert read_target(folder).weights["norm"].dtype == "F16"

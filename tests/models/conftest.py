"""Tiny random checkpoints, and hostile files written byte by byte."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

Arrays = dict[str, npt.NDArray[Any]]
MakeCheckpoint = Callable[..., Path]

DTYPES: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
}
TARGET_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 6,
    "tie_word_embeddings": False,
    "eos_token_id": 3,
    **SIZES,
}
DRAFT_CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 8,
    "num_target_layers": 6,
    "num_hidden_layers": 2,
    "dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 2, 3]},
    **SIZES,
}


def layer_shapes(config: Mapping[str, Any], prefix: str, qk_norm: bool) -> dict[str, list[int]]:
    """Names and shapes of the decoder layers, written out independently of the name maps."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    shapes: dict[str, list[int]] = {}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": [hidden],
            "post_attention_layernorm.weight": [hidden],
            "self_attn.q_proj.weight": [queries, hidden],
            "self_attn.k_proj.weight": [keys, hidden],
            "self_attn.v_proj.weight": [keys, hidden],
            "self_attn.o_proj.weight": [hidden, queries],
            **({f"self_attn.{name}_norm.weight": [head_dim] for name in "qk"} if qk_norm else {}),
            "mlp.gate_proj.weight": [inner, hidden],
            "mlp.up_proj.weight": [inner, hidden],
            "mlp.down_proj.weight": [hidden, inner],
        }
        if config.get("attention_bias"):
            rows = {"q": queries, "k": keys, "v": keys, "o": hidden}
            layer |= {f"self_attn.{name}_proj.bias": [size] for name, size in rows.items()}
        shapes |= {f"{prefix}layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def target_shapes(config: Mapping[str, Any]) -> dict[str, list[int]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    shapes |= layer_shapes(config, "model.", config["architectures"] == ["Qwen3ForCausalLM"])
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = [vocab, hidden]
    return shapes


def draft_shapes(config: Mapping[str, Any], taps: int) -> dict[str, list[int]]:
    hidden = config["hidden_size"]
    shapes = {
        "fc.weight": [hidden, taps * hidden],
        "hidden_norm.weight": [hidden],
        "norm.weight": [hidden],
    }
    return shapes | layer_shapes(config, "", qk_norm=True)


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, list[int]],
    dtype: str = "F32",
    shards: int = 1,
) -> Path:
    rng = np.random.default_rng(0)
    arrays: Arrays = {
        name: rng.standard_normal(shape).astype(DTYPES[dtype]) for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(arrays, folder / "model.safetensors")
        return folder
    names = sorted(arrays)
    weight_map: dict[str, str] = {}
    for k in range(shards):
        shard = f"model-{k + 1:05}-of-{shards:05}.safetensors"
        part = {name: arrays[name] for name in names[k::shards]}
        save_file(part, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`; ... as a value drops the key."""
    return {k: v for k, v in {**base, **changes}.items() if v is not ...}


@pytest.fixture
def make_target(tmp_path: Path) -> MakeCheckpoint:
    """Writes a target; keywords change its config after the shapes were taken from `shape_of`."""

    def make(
        shape_of: Mapping[str, Any] | None = None,
        dtype: str = "F32",
        shards: int = 1,
        extra: Mapping[str, list[int]] | None = None,
        **changes: Any,
    ) -> Path:
        config = merged(TARGET_CONFIG, changes)
        shapes = target_shapes(merged(TARGET_CONFIG, shape_of or {})) | dict(extra or {})
        return write_checkpoint(tmp_path / "target", config, shapes, dtype, shards)

    return make


@pytest.fixture
def make_draft(tmp_path: Path) -> MakeCheckpoint:
    """Writes a draft; `inner` changes dflash_config or, no mapping, replaces it."""

    def make(
        inner: Any = None,
        taps: int = 3,
        shape_of: Mapping[str, Any] | None = None,
        dtype: str = "F32",
        extra: Mapping[str, list[int]] | None = None,
        **changes: Any,
    ) -> Path:
        config = merged(DRAFT_CONFIG, changes)
        if inner is None or isinstance(inner, Mapping):
            inner = merged(DRAFT_CONFIG["dflash_config"], inner or {})
        config["dflash_config"] = inner
        shapes = draft_shapes(merged(DRAFT_CONFIG, shape_of or {}), taps) | dict(extra or {})
        return write_checkpoint(tmp_path / "draft", config, shapes, dtype)

    return make


def safetensors_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A .safetensors file as bytes; `header` may be bytes, and its stated length may lie."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


@pytest.fixture
def hostile(tmp_path: Path) -> Callable[..., Path]:
    """Writes `safetensors_bytes` to a file."""

    def write(header: Any, data: bytes = b"", length: int | None = None) -> Path:
        path = tmp_path / "hostile.safetensors"
        path.write_bytes(safetensors_bytes(header, data, length))
        return path

    return write

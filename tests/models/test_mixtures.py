"""Checkpoints of mixtures of experts: what is read from them, and what is refused."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.models.moe import Clamp, MoeSpec
from dflash_trt.models.target import read_target
from tests.models.helpers import edit_json, edit_tensors, refused
from tests.reference.checkpoints import write_target

LAYER = "model.layers.1.mlp.experts"
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


def gpt_oss(folder: Path, **options: Any) -> Path:
    return write_target(folder / "target", "gpt_oss", num_layers=4, rope="yarn", **options)


def qwen(folder: Path, **options: Any) -> Path:
    return write_target(folder / "target", "qwen3_moe", num_layers=2, **options)


def test_what_a_gpt_oss_checkpoint_says(tmp_path: Path) -> None:
    target = read_target(gpt_oss(tmp_path, mxfp4=True))
    assert target.family == "gpt_oss"
    assert target.moe == MoeSpec(8, 3, 96, "chosen", False, Clamp(7.0, 1.702), "MXFP4")
    assert target.layer_windows == (24, None, 24, None)
    assert target.has_sinks and target.attention_bias and not target.qk_norm
    assert target.quantization is not None and target.quantization.algorithm == "MXFP4"
    assert target.weights["layers.3.experts.down.blocks"].shape == (8, 64, 3, 16)
    assert target.weights["layers.3.sinks"].shape == (4,)


def test_what_a_qwen3_moe_checkpoint_says(tmp_path: Path) -> None:
    folder = qwen(tmp_path, normalized=False, shards=2)
    spec = MoeSpec(8, 3, 96, "all", False, None, "float")
    assert read_target(folder).moe == spec
    # transformers 4 and 5 call it otherwise
    edit_json(folder / "config.json", num_local_experts=..., num_experts=8)
    target = read_target(folder)
    assert target.moe == spec and target.layer_windows == (None, None)
    assert target.weights["layers.1.experts.7.down"].shape == (64, 96)


def test_a_config_of_millions_of_experts(tmp_path: Path) -> None:
    """Their names alone took a minute and gigabytes."""
    folder = qwen(tmp_path)
    edit_json(folder / "config.json", num_hidden_layers=1024, num_local_experts=4096)
    tracemalloc.start()
    try:
        with refused("it needs 12,5", " tensors, the files hold "):
            read_target(folder)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_experts_missing_in_one_shard(tmp_path: Path) -> None:
    folder = qwen(tmp_path, shards=3)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    shard = sorted(set(places.values()))[1]
    lost = [name for name in load_file(folder / shard) if ".experts." in name][:2]
    edit_tensors(folder / shard, dict.fromkeys(lost))
    with refused("does not match the shards", lost[0], shard):
        read_target(folder)
    edit_json(index, weight_map={name: at for name, at in places.items() if name not in lost})
    with refused("2 missing", lost[0], lost[1]):
        read_target(folder)


@pytest.mark.parametrize(
    ("name", "change", "piece"),
    [
        (f"{LAYER}.down_proj_scales", lambda t: t[:, 1:], '" is [8, 63, 3], not [8, 64, 3]'),
        (f"{LAYER}.gate_up_proj_scales", None, f'1 missing ("{LAYER}.gate_up_proj_scales")'),
        (f"{LAYER}.down_proj_scales", torch.Tensor.float, "dtype is F32, MXFP4 is stored as U8"),
        ("model.layers.0.self_attn.sinks", None, '1 missing ("model.layers.0.self_attn.sinks")'),
    ],
)
def test_packed_experts_that_do_not_fit(
    tmp_path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None, piece: str
) -> None:
    folder = gpt_oss(tmp_path, mxfp4=True)
    file = folder / "model.safetensors"
    edit_tensors(file, {name: None if change is None else change(load_file(file)[name])})
    with refused(piece, name):
        read_target(folder)


@pytest.mark.parametrize(
    ("write", "keys", "pieces"),
    [
        (qwen, {"mlp_only_layers": [1]}, ("mlp_only_layers", "every layer must have")),
        (qwen, {"decoder_sparse_step": 2}, ("decoder_sparse_step = 2",)),
        (
            qwen,
            {"shared_expert_intermediate_size": 64},
            ("shared_expert_intermediate_size = 64 is not supported", "Qwen3MoeForCausalLM"),
        ),
        (qwen, MXFP4, ("gpt-oss's experts only",)),
        (qwen, {"num_experts_per_tok": 9}, ("must be an integer from 1 to 8",)),
        (gpt_oss, {"layer_types": ["chunked_attention"] * 4}, ("must hold only",)),
        (gpt_oss, {"sliding_window": None}, ("sliding_window is missing",)),
        (gpt_oss, {"num_local_experts": 4}, ("wrong shape", "not [4, 64]")),
        (gpt_oss, MXFP4, ("gate_up_proj_blocks", "16 missing", "8 unexpected")),
    ],
)
def test_configs_of_other_or_newer_families(
    tmp_path: Path, write: Callable[[Path], Path], keys: dict[str, Any], pieces: tuple[str, ...]
) -> None:
    folder = write(tmp_path)
    edit_json(folder / "config.json", **keys)
    with refused(*pieces):
        read_target(folder)

"""Checkpoints of mixtures of experts: what is read from them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.moe import Clamp, MoeSpec
from dflash_trt.checkpoints.pair import check_pair
from dflash_trt.checkpoints.target import read_target
from dflash_trt.errors import DflashError
from tests.checkpoints.conftest import Refused
from tests.reference.checkpoints import write_draft, write_target

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1.mlp.experts"


def gpt_oss(folder: Path, **options: Any) -> Path:
    return write_target(folder / "target", "gpt_oss", num_layers=4, rope="yarn", **options)


def qwen(folder: Path, **options: Any) -> Path:
    return write_target(folder / "target", "qwen3_moe", num_layers=2, **options)


def change(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit(folder: Path, alter: Callable[[Tensors], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    alter(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_what_a_gpt_oss_checkpoint_says(tmp_path: Path) -> None:
    target = read_target(gpt_oss(tmp_path, mxfp4=True))
    assert target.family == "gpt_oss"
    assert target.moe == MoeSpec(8, 3, 96, "chosen", False, Clamp(7.0, 1.702), "MXFP4")
    assert target.layer_windows == (24, None, 24, None)
    assert target.has_sinks and target.attention_bias and not target.qk_norm
    assert target.quantization is not None and target.quantization.algorithm == "MXFP4"
    assert target.weights["layers.3.experts.down.blocks"].shape == (8, 64, 3, 16)
    assert target.weights["layers.3.sinks"].shape == (4,)


def test_layers_alternate_where_the_config_does_not_say(tmp_path: Path) -> None:
    folder = gpt_oss(tmp_path)
    change(folder, layer_types=..., swiglu_limit=5.5)
    target = read_target(folder)
    assert target.layer_windows == (24, None, 24, None)
    assert target.moe is not None and target.moe.clamp == Clamp(5.5, 1.702)


def test_what_a_qwen3_moe_checkpoint_says(tmp_path: Path) -> None:
    folder = qwen(tmp_path, normalized=False, shards=2)
    spec = MoeSpec(8, 3, 96, "all", False, None, "float")
    assert read_target(folder).moe == spec
    # transformers 4 and 5 call it otherwise
    change(folder, num_local_experts=..., num_experts=8)
    target = read_target(folder)
    assert target.moe == spec and target.layer_windows == (None, None)
    assert target.weights["layers.1.experts.7.down"].shape == (64, 96)


def test_experts_missing_in_one_shard(tmp_path: Path, refused: Refused) -> None:
    folder = qwen(tmp_path, shards=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = sorted(set(index["weight_map"].values()))[1]
    tensors = load_file(folder / shard)
    lost = [name for name in tensors if ".experts." in name][:2]
    save_file({n: t for n, t in tensors.items() if n not in lost}, folder / shard)
    with refused("does not match the shards", lost[0], shard):
        read_target(folder)
    for name in lost:
        del index["weight_map"][name]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused("2 missing", lost[0], lost[1]):
        read_target(folder)


@pytest.mark.parametrize(
    ("alter", "pieces"),
    [
        (
            lambda t: t.update(
                {f"{LAYER}.down_proj_scales": t[f"{LAYER}.down_proj_scales"][:, 1:]}
            ),
            (f'"{LAYER}.down_proj_scales" is [8, 63, 3], not [8, 64, 3]',),
        ),
        (
            lambda t: t.pop(f"{LAYER}.gate_up_proj_scales"),
            (f'1 missing ("{LAYER}.gate_up_proj_scales")',),
        ),
        (
            lambda t: t.update({f"{LAYER}.down_proj_scales": torch.ones(8, 64, 3)}),
            ("its dtype is F32, MXFP4 is stored as U8",),
        ),
        (
            lambda t: t.update({f"{LAYER}.gate_up_proj_blocks": torch.ones(8, 192, 1, 32).byte()}),
            ("is [8, 192, 1, 32], not [8, 192, 2, 16]",),
        ),
        (lambda t: t.pop("model.layers.0.self_attn.sinks"), ("1 missing", "self_attn.sinks")),
    ],
)
def test_packed_experts_that_do_not_fit(
    tmp_path: Path, refused: Refused, alter: Callable[[Tensors], None], pieces: tuple[str, ...]
) -> None:
    folder = gpt_oss(tmp_path, mxfp4=True)
    edit(folder, lambda t: (alter(t), t.update({n: v.contiguous() for n, v in t.items()}))[-1])
    with refused(*pieces):
        read_target(folder)


def test_experts_that_are_not_packed_as_the_config_says(tmp_path: Path, refused: Refused) -> None:
    folder = gpt_oss(tmp_path)
    change(folder, quantization_config={"quant_method": "mxfp4"})
    with refused("gate_up_proj_blocks", "16 missing", "8 unexpected"):
        read_target(folder)


@pytest.mark.parametrize(
    ("family", "keys", "pieces"),
    [
        ("qwen3_moe", {"mlp_only_layers": [1]}, ("mlp_only_layers", "every layer must have")),
        ("qwen3_moe", {"decoder_sparse_step": 2}, ("decoder_sparse_step = 2",)),
        (
            "qwen3_moe",
            {"shared_expert_intermediate_size": 64},
            ("shared_expert_intermediate_size = 64 is not supported", "Qwen3MoeForCausalLM"),
        ),
        ("qwen3_moe", {"full_attention_interval": 4}, ("full_attention_interval = 4",)),
        ("qwen3_moe", {"architectures": ["Qwen3NextForCausalLM"]}, ("Qwen3NextForCausalLM",)),
        (
            "qwen3_moe",
            {"quantization_config": {"quant_method": "mxfp4"}},
            ("gpt-oss's experts only",),
        ),
        ("qwen3_moe", {"num_experts_per_tok": 9}, ("must be an integer from 1 to 8",)),
        ("gpt_oss", {"n_shared_experts": 1}, ("n_shared_experts = 1 is not supported",)),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, ("must hold only",)),
        ("gpt_oss", {"sliding_window": None}, ("sliding_window is missing",)),
        ("gpt_oss", {"swiglu_limit": "7"}, ("swiglu_limit", "must be a number")),
        ("gpt_oss", {"num_local_experts": 4}, ("wrong shape", "not [4, 64]")),
    ],
)
def test_configs_of_other_or_newer_families(
    tmp_path: Path, refused: Refused, family: str, keys: dict[str, Any], pieces: tuple[str, ...]
) -> None:
    folder = qwen(tmp_path) if family == "qwen3_moe" else gpt_oss(tmp_path)
    change(folder, **keys)
    with refused(*pieces):
        read_target(folder)


def test_a_draft_for_another_target(tmp_path: Path) -> None:
    """As gpt-oss-20b's draft with gpt-oss-120b: of one width, of other depths."""
    small = gpt_oss(tmp_path / "20b")
    large = write_target(tmp_path / "120b", "gpt_oss", num_layers=6, rope="yarn")
    write_draft(tmp_path / "draft", large, target_layer_ids=[1, 5])
    draft = read_draft(tmp_path / "draft")
    check_pair(read_target(large), draft)
    with pytest.raises(DflashError) as caught:
        check_pair(read_target(small), draft)
    assert "num_target_layers 6 is not the target's 4" in str(caught.value)
    assert "target_layer_ids 5 are past the target's last layer (3)" in str(caught.value)


def test_a_draft_that_claims_packed_experts(tmp_path: Path, refused: Refused) -> None:
    write_draft(tmp_path / "draft", gpt_oss(tmp_path), target_layer_ids=[1])
    change(tmp_path / "draft", quantization_config={"quant_method": "mxfp4"})
    with refused('quantization_config.quant_method = "mxfp4" is not supported', "gpt-oss"):
        read_draft(tmp_path / "draft")

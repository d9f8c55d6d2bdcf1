"""Shapes: the public pairs weigh what is published, and config.json gives the same ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_trt.bundle.memory.weight_bytes import draft_weight_bytes, target_weight_bytes
from dflash_trt.deploy.planning.known_pairs import find_pair, pair_names
from dflash_trt.deploy.planning.read_shapes import read_pair_shape, read_target_shape
from dflash_trt.errors import DflashError
from dflash_trt.models.build_config import data_folder, load_config
from dflash_trt.models.draft import default_target_layer_ids

# Bytes of checkpoints: parameters x 2 of the model cards; for gpt-oss the sizes in GiB that its
# model card (arXiv 2508.10925, table 1) states.
PUBLISHED = {
    "qwen3-4b": 4.02e9 * 2,
    "qwen3-8b": 8.19e9 * 2,
    "llama-3.1-8b": 8.03e9 * 2,
    "gpt-oss-20b": 12.8 * 2**30,
    "gpt-oss-120b": 60.8 * 2**30,
    "qwen3-coder-30b-a3b": 30.5e9 * 2,
    "qwen3.5-4b": 4.2e9 * 2,
    "qwen3.5-27b": 27e9 * 2,
    "qwen3.8-27b": 27e9 * 2,
    "qwen3.5-35b-a3b": 35e9 * 2,
    "qwen3.6-35b-a3b": 35e9 * 2,
    "qwen3.5-122b-a10b": 122e9 * 2,
    "gemma-4-31b": 30.7e9 * 2,
    "gemma-4-26b-a4b": 25.2e9 * 2,
}

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "quantization_config": {"quant_method": "mxfp4"},
    "sliding_window": 128,
    "vocab_size": 201088,
}
GPT_OSS_DRAFT = {
    **{key: GPT_OSS[key] for key in ("head_dim", "hidden_size", "max_position_embeddings")},
    **{key: GPT_OSS[key] for key in ("num_attention_heads", "num_key_value_heads", "vocab_size")},
    "architectures": ["DFlashDraftModel"],
    "block_size": 10,
    "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 9, 17, 25, 33]},
    "intermediate_size": 7680,
    "layer_types": ["full_attention"] * 8,
    "num_hidden_layers": 8,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "vocab_size": 151936,
}


def _write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_targets_weigh_what_is_published(name: str) -> None:
    assert target_weight_bytes(find_pair(name).target) == pytest.approx(PUBLISHED[name], rel=0.01)


def test_public_drafts_tap_the_layers_that_upstream_takes_by_default() -> None:
    """Each config.json states its layers; they are those of upstream's rule for as many taps."""
    for name in pair_names():
        pair = find_pair(name)
        ids = default_target_layer_ids(
            len(pair.target.sizes.layers), len(pair.draft.target_layer_ids)
        )
        assert pair.draft.target_layer_ids == ids or pair.draft.dflash2, name


@pytest.mark.parametrize(
    ("draft", "piece"),
    [
        ({"target_layer_ids": [1, 36]}, r"target_layer_ids \[1, 36\] of 36 layers"),
        ({"mask_token_id": 201088}, "mask_token_id 201088 is outside"),
    ],
)
def test_a_published_draft_is_of_its_target(
    tmp_path: Path, draft: dict[str, Any], piece: str
) -> None:
    values = yaml.safe_load(load_config("gpt-oss-120b")[1].read_text(encoding="utf-8"))
    values["shape"]["draft"] |= draft
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    with pytest.raises(DflashError, match=piece):
        load_config(str(path))


def test_every_public_pair_is_checked() -> None:
    assert set(pair_names()) == set(PUBLISHED)
    assert draft_weight_bytes(find_pair("gpt-oss-120b").draft) == pytest.approx(2 * 0.8e9, rel=0.03)


@pytest.mark.parametrize("change", [{}, {"layer_types": None}, {"moe_intermediate_size": 1}])
def test_gpt_oss_from_its_configs(tmp_path: Path, change: dict[str, Any]) -> None:
    target = _write(tmp_path / "target", {**GPT_OSS, **change})
    draft = _write(tmp_path / "draft", GPT_OSS_DRAFT)
    read, known = read_pair_shape(target, draft), find_pair("gpt-oss-120b")
    assert (read.target, read.draft, read.published) == (known.target, known.draft, ())
    assert read.architecture == known.architecture


@pytest.mark.parametrize("change", [{"head_dim": None}, {"architectures": ["NotYetKnown"]}])
def test_qwen3_moe_from_its_config(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = _write(tmp_path / "target", {**QWEN3_MOE, **change})
    assert read_target_shape(folder) == find_pair("qwen3-coder-30b-a3b").target


def test_a_whole_model_in_fp8(tmp_path: Path) -> None:
    quantized = {**QWEN3_MOE, "quantization_config": {"quant_method": "fp8"}}
    shape = read_target_shape(_write(tmp_path / "target", quantized))
    assert (shape.attention_format, shape.mlp_format) == ("fp8", "fp8")


def test_the_demo_pair() -> None:
    demo = data_folder("demo_pair")
    pair = read_pair_shape(demo / "target", demo / "draft")
    stored = sum(path.stat().st_size for path in (demo / "target").glob("*.safetensors"))
    assert target_weight_bytes(pair.target) == pytest.approx(stored, rel=0.1)
    assert pair.draft.block_size == 8


@pytest.mark.parametrize(
    ("change", "piece"),
    [
        ({"num_experts_per_tok": 200}, "num_experts_per_tok"),
        ({"num_local_experts": 5000}, "num_local_experts"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"sliding_window": None}, "sliding_window"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_a_config_that_makes_no_sense(tmp_path: Path, change: dict[str, Any], piece: str) -> None:
    config = {**GPT_OSS, "architectures": ["NotYetKnown"], **change}
    with pytest.raises(DflashError, match=piece):
        read_target_shape(_write(tmp_path / "target", config))


def test_a_target_is_no_draft(tmp_path: Path) -> None:
    target = _write(tmp_path / "t", GPT_OSS)
    with pytest.raises(DflashError, match="no DFlash draft"):
        read_pair_shape(target, target)

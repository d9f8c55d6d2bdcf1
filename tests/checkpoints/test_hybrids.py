"""Qwen3.5 checkpoints: what is read of the published layout, what is refused, in a line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.checkpoints.target import read_target
from dflash_trt.planning.read_shapes import read_target_shape
from tests.checkpoints.helpers import edit_json, edit_tensors, refused
from tests.reference.checkpoints import write_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hybrid") / "target"
    return write_target(made, "qwen3_5", "bfloat16", vision=True, num_layers=8, head_dim=32)


@pytest.fixture
def config(folder: Path) -> Any:
    """Writes a text config with some keys changed; the original comes back."""
    path = folder / "config.json"
    before = path.read_text()

    def change(**changes: Any) -> None:
        text = json.loads(before)["text_config"] | changes
        edit_json(path, text_config={key: one for key, one in text.items() if one is not None})

    yield change
    path.write_text(before)


def test_the_text_model_is_read_and_the_rest_let_be(folder: Path) -> None:
    target = read_target(folder)
    kinds = [layer.recurrent is not None for layer in target.sizes.layers]
    assert kinds == [True, True, True, False] * 2
    assert target.sizes.has_state and target.rotary_dim == 8 and target.norm_offset == 1.0
    assert target.weights["layers.0.A_log"].dtype == "F32"
    assert target.weights["layers.3.q_proj"].shape == (2 * 4 * 32, 64)
    unused = [name for name in target.checkpoint.tensors if name.startswith(("mtp.", "model.vis"))]
    assert len(unused) > 5
    assert not {entry.name for entry in target.weights.values()} & set(unused)
    assert read_target_shape(folder).sizes == target.sizes


def test_kinds_follow_the_interval_where_they_are_not_listed(folder: Path, config: Any) -> None:
    config(layer_types=None, full_attention_interval=4)
    sizes = read_target(folder).sizes
    assert [i for i, layer in enumerate(sizes.layers) if layer.recurrent is None] == [3, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"]}, "a list of 8 layer kinds"),
        ({"layer_types": ["full_attention"] * 8}, "must hold linear_attention and full_attention"),
        ({"layer_types": [["linear_attention"]] * 8}, "and nothing else"),
        ({"attn_output_gate": False}, "it must be true"),
        ({"linear_num_value_heads": 3}, "a multiple of linear_num_key_heads (2)"),
        ({"linear_value_head_dim": 32}, "only linear_key_head_dim (16) is"),
        ({"linear_conv_kernel_dim": 1}, "from 2 to 64"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.1}}, "an even part"),
        ({"attention_bias": True}, "it must be false"),
        ({"hidden_act": "gelu"}, "only silu is"),
        ({"num_hidden_layers": 2**20}, "from 1 to 1024"),
        ({"shared_expert_intermediate_size": 32}, "as it is known here has none"),
    ],
    ids=str,
)
def test_configs_that_say_otherwise(
    folder: Path, config: Any, changes: dict[str, Any], message: str
) -> None:
    config(**changes)
    with refused(next(iter(changes)).replace("rope_parameters", "partial"), message):
        read_target(folder)


def test_a_config_without_its_text_part(folder: Path, config: Any) -> None:
    edit_json(folder / "config.json", text_config=None)
    with refused("text_config", "must be the text model's config"):
        read_target(folder)


def test_a_quantised_hybrid(folder: Path, config: Any) -> None:
    stated = {"quant_method": "modelopt", "quant_algo": "FP8"}
    edit_json(folder / "config.json", quantization_config=stated)
    with refused("is quantised, which qwen3_5 checkpoints cannot be here yet"):
        read_target(folder)


def test_a_text_export_beside_a_vision_config(tmp_path: Path) -> None:
    text = write_target(tmp_path / "text", "qwen3_5", num_layers=4)
    config = json.loads((text / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config}
    (text / "config.json").write_text(json.dumps(whole))
    with refused("missing", "model.language_model.", "unexpected"):
        read_target(text)


def test_a_layer_that_is_of_the_other_kind(tmp_path: Path) -> None:
    text = write_target(tmp_path / "text", "qwen3_5", num_layers=4)
    edit_tensors(
        text / "model.safetensors",
        {"model.layers.0.linear_attn.A_log": None, "model.layers.0.self_attn.q_norm.weight": ONE},
    )
    with refused('1 missing ("model.layers.0.linear_attn.A_log")', "1 unexpected"):
        read_target(text)


ONE = torch.ones(16)

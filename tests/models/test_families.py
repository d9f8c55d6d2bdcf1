"""Mixtures of experts and Qwen3.5: what is read of the published layouts, what is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.deploy.planning.read_shapes import read_target_shape
from dflash_trt.models.moe import Clamp, MoeSpec
from dflash_trt.models.sizes import ExpertSizes
from dflash_trt.models.target import read_target
from tests.models.helpers import edit_json, edit_tensors, refused, text_config_changer
from tests.reference.checkpoints import write_target
from tests.reference.quantized import quantize_folder

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hybrid") / "target"
    return write_target(made, "qwen3_5", "bfloat16", vision=True, num_layers=8, head_dim=32)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mixture") / "target"
    return write_target(made, "qwen3_5_moe", "bfloat16", vision=True, num_layers=4, head_dim=32)


@pytest.fixture
def config(folder: Path) -> Iterator[Any]:
    yield from text_config_changer(folder)


@pytest.fixture
def mixture_config(mixture: Path) -> Iterator[Any]:
    yield from text_config_changer(mixture)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"]}, "a list of 8 layer kinds"),
        ({"layer_types": ["full_attention"] * 8}, "must hold linear_attention and full_attention"),
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


def test_experts_are_read_beside_the_one_that_all_share(mixture: Path) -> None:
    target = read_target(mixture)
    assert target.sizes.has_state and target.moe is not None
    moe = target.moe
    assert (moe.experts, moe.chosen, moe.intermediate_size, moe.shared) == (8, 3, 96, 48)
    assert moe.routing == "all" and moe.is_normalized
    assert target.weights["layers.3.experts.gate_up.rows"].shape == (8, 2 * 96, 64)
    assert target.weights["layers.0.shared_expert.down_proj"].shape == (64, 48)
    shape = read_target_shape(mixture)
    assert shape.experts == ExpertSizes(8, 3, 96, shared=48)
    assert shape.sizes.layers == target.sizes.layers
    assert shape.router_weights == 9 * 64 and shape.shared_weights == 3 * 64 * 48


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_expert_intermediate_size": None}, "is missing"),
        ({"shared_expert_intermediate_size": 47}, "mlp.shared_expert.gate_proj.weight"),
        ({"norm_topk_prob": False}, "it must be true"),
        ({"mlp_only_layers": [1]}, "every layer must have experts"),
        ({"moe_intermediate_size": 95}, "must be a multiple of 2 for experts"),
        ({"n_shared_experts": 1}, "as it is known here has none"),
    ],
    ids=str,
)
def test_mixtures_that_say_otherwise(
    mixture: Path, mixture_config: Any, changes: dict[str, Any], message: str
) -> None:
    mixture_config(**changes)
    key = next(iter(changes)) if "mlp." not in message else "wrong shape"
    with refused(key, message):
        read_target(mixture)


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_a_mixture_with_quantised_experts(tmp_path: Path, algorithm: Any) -> None:
    """As ModelOpt publishes them, one by one."""
    sizes: dict[str, Any] = {"num_layers": 4, "experts": 4, "shards": 1, "separate": True}
    folder = write_target(tmp_path / "target", "qwen3_5_moe", **sizes)
    quantize_folder(folder, algorithm, exclude=["lm_head", "mtp*"])
    with refused("mlp.experts.0.gate_proj", f"is an expert's in {algorithm}, which is not read"):
        read_target(folder)

"""The scales of an FP8 KV cache: where checkpoints put them, and what they may not be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.checkpoints.kv_scales import read_kv_scales
from dflash_trt.checkpoints.target import TargetSpec, read_target
from tests.checkpoints.helpers import edit_tensors, refused
from tests.reference.checkpoints import write_target

Scales = dict[str, torch.Tensor]
FP8 = {"kv_cache_quant_algo": "FP8"}


def read(folder: Path, scales: Scales, cache: dict[str, Any] = FP8) -> TargetSpec:
    write_target(folder, num_layers=2)
    named = {f"model.layers.1.self_attn.{name}": value for name, value in scales.items()}
    edit_tensors(folder / "model.safetensors", named)
    config = {"quantization": {"quant_algo": None, **cache}}
    (folder / "hf_quant_config.json").write_text(json.dumps(config))
    return read_target(folder)


def of_layers(spec: TargetSpec) -> list[tuple[float, float]]:
    tensors, weights, stated = spec.checkpoint.tensors, spec.weights, spec.quantization
    return [read_kv_scales(tensors, weights, stated, layer) for layer in range(2)]


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({}, (1.0, 1.0)),
        (
            {"k_proj.k_scale": torch.tensor(0.5), "v_proj.v_scale": torch.tensor([0.25])},
            (0.5, 0.25),
        ),
        ({"k_scale": torch.tensor(2.0), "v_scale": torch.tensor(4.0)}, (2.0, 4.0)),
        ({"v_proj.v_scale": torch.tensor(0.125)}, (1.0, 0.125)),
    ],
)
def test_what_a_checkpoint_states(
    tmp_path: Path, scales: Scales, expected: tuple[float, float]
) -> None:
    assert of_layers(read(tmp_path / "target", scales)) == [(1.0, 1.0), expected]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.tensor([0.5, 0.5]), "F32 [2], not an F32 scalar"),
        (torch.tensor(1), "I64 [], not an F32 scalar"),
        (torch.tensor(0.0), "its value is 0"),
        (torch.tensor(-1.0), "its value is -1"),
        (torch.tensor(float("nan")), "its value is nan"),
        (torch.tensor(float("inf")), "its value is inf"),
        (torch.zeros(0), "F32 [0], not an F32 scalar"),
        (torch.tensor(0.5, dtype=torch.bfloat16), "BF16 [], not an F32 scalar"),
    ],
)
def test_what_no_scale_is(tmp_path: Path, value: torch.Tensor, what: str) -> None:
    spec = read(tmp_path / "target", {"k_proj.k_scale": value})
    with refused(what, "k_proj.k_scale", "--kv-dtype"):
        of_layers(spec)


@pytest.mark.parametrize(
    ("cache", "algorithm", "k"),
    [
        (FP8, "FP8", 0.5),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "FP8", 0.5),
        ({"kv_cache_quant_algo": "NVFP4"}, "NVFP4", 1.0),
        ({"kv_cache_quant_algo": "INT8"}, "INT8", 1.0),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "8-bit int", 1.0),
    ],
)
def test_scales_of_another_cache_are_not_its(
    tmp_path: Path, cache: dict[str, Any], algorithm: str, k: float
) -> None:
    spec = read(tmp_path / "target", {"k_proj.k_scale": torch.tensor(0.5)}, cache)
    assert spec.quantization is not None
    assert spec.quantization.algorithm is None
    assert spec.quantization.kv_cache_algorithm == algorithm
    assert of_layers(spec) == [(1.0, 1.0), (k, 1.0)]

"""Quantised checkpoints and scales of FP8 KV caches: what is read, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.models.decoder import DecoderSpec
from dflash_trt.models.draft import read_draft
from dflash_trt.models.quantized_weights import (
    count_parameters,
    quantized_linears,
    read_kv_scales,
)
from dflash_trt.models.target import TargetSpec, read_target
from tests.models.helpers import edit_json, edit_tensors, refused
from tests.reference.checkpoints import write_draft, write_target
from tests.reference.quantized import Algorithm, quantize_folder, write_quant_config

EXCLUDED = ("lm_head", "model.embed_tokens")
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(params=["FP8", "NVFP4"])
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    value: Algorithm = request.param
    return value


@pytest.fixture
def target(tmp_path: Path) -> Callable[..., Path]:
    """Writes a quantised target of two layers."""

    def make(algorithm: Algorithm, **options: Any) -> Path:
        folder = write_target(tmp_path / "target", num_layers=2, vocab=64, dtype="bfloat16")
        quantize_folder(folder, algorithm, exclude=EXCLUDED, **options)
        return folder

    return make


def parameters(spec: DecoderSpec) -> int:
    return count_parameters(spec.weights)


def test_a_quantised_target(
    target: Callable[..., Path], tmp_path: Path, algorithm: Algorithm
) -> None:
    plain = write_target(tmp_path / "plain", num_layers=2, vocab=64)
    spec = read_target(target(algorithm, kv_cache=True, scalar_shape=(1,)))
    assert spec.quantization is not None
    assert spec.quantization.algorithm == algorithm
    assert spec.quantization.excluded == EXCLUDED
    assert spec.quantization.kv_cache_algorithm == "FP8"
    assert set(quantized_linears(spec.weights).values()) == {algorithm}
    assert len(quantized_linears(spec.weights)) == 2 * 7
    weight = spec.weights["layers.0.q_proj"]
    stored = {"FP8": ("F8_E4M3", (64, 64)), "NVFP4": ("U8", (64, 32))}
    assert (weight.dtype, weight.shape) == stored[algorithm]
    assert spec.weights["layers.0.q_proj.input_scale"].shape == ()
    assert spec.weights["layers.1.down_proj.weight_scale"].name.endswith("down_proj.weight_scale")
    assert parameters(spec) == parameters(read_target(plain))


def test_a_draft_as_modelopt_exports_it(tmp_path: Path, algorithm: Algorithm) -> None:
    write_target(tmp_path / "target")
    folder = write_draft(tmp_path / "draft", tmp_path / "target", target_layer_ids=[0, 3, 1])
    plain = parameters(read_draft(folder))
    quantize_folder(folder, algorithm, exclude=["lm_head", "model*"], form="nested")
    spec = read_draft(folder)
    assert set(quantized_linears(spec.weights)) >= {"fc", "layers.1.k_proj"}
    assert spec.fc_input_size == 3 * 64
    assert parameters(spec) == plain


@pytest.mark.parametrize(
    ("name", "value", "pieces"),
    [
        (f"{Q_PROJ}.input_scale", None, ("needs", "q_proj.input_scale", "missing")),
        (f"{Q_PROJ}.input_scale", torch.tensor(math.nan), ("its value is nan",)),
        (f"{Q_PROJ}.input_scale", torch.tensor(0.0), ("its value is 0, not a finite",)),
        (f"{Q_PROJ}.input_scale", torch.ones(2), ("is F32 [2], not an F32 scalar",)),
        (f"{Q_PROJ}.weight_scale", torch.ones(64, 2), ("is F32 [64, 2], not",)),
        (f"{Q_PROJ}.weight", torch.ones(64, 64).bfloat16(), ("BF16, but", "not exclude it")),
        ("model.embed_tokens.weight", torch.ones(64, 32).byte(), ("dtype U8 is not supported",)),
        ("model.norm.input_scale", torch.tensor(1.0), ("1 unexpected", "model.norm.input")),
    ],
    ids=str,
)
def test_tensor_errors(
    target: Callable[..., Path],
    algorithm: Algorithm,
    name: str,
    value: torch.Tensor | None,
    pieces: tuple[str, ...],
) -> None:
    folder = target(algorithm)
    edit_tensors(folder / "model.safetensors", {name: value})
    with refused(*pieces):
        read_target(folder)


def _two_statements(folder: Path) -> None:
    quantization = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    edit_json(folder / "hf_quant_config.json", quantization=quantization)


def _no_statement(folder: Path) -> None:
    (folder / "hf_quant_config.json").unlink()
    edit_json(folder / "config.json", quantization_config=...)


@pytest.mark.parametrize(
    ("change", "pieces"),
    [
        (
            _two_statements,
            ('quant_algo is "NVFP4" in one and "FP8"', "exclude list", "same export"),
        ),
        (
            # Weights only is for experts.
            lambda folder: edit_json(
                folder / "config.json",
                quantization_config={"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
            ),
            ('"W4A16_NVFP4" is not supported',),
        ),
        (_no_statement, ("it is U8, but config.json has no quantization_config",)),
        (
            lambda folder: write_quant_config(
                folder, "NVFP4", [*EXCLUDED, "model.layers.1*"], "modelopt"
            ),
            ("layers.1", "it is U8, but the config excludes", '"model.layers.1*"'),
        ),
        (
            lambda folder: write_quant_config(folder, "FP8", EXCLUDED, "modelopt"),
            ("it is U8, but the config says FP8",),
        ),
    ],
)
def test_statements_and_scales_of_nvfp4(
    target: Callable[..., Path], change: Callable[[Path], None], pieces: tuple[str, ...]
) -> None:
    folder = target("NVFP4")
    change(folder)
    with refused(*pieces):
        read_target(folder)


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
    ("cache", "algorithm", "k"),
    [
        (FP8, "FP8", 0.5),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "FP8", 0.5),
        ({"kv_cache_quant_algo": "NVFP4"}, "NVFP4", 1.0),
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

"""Quantised linears: both bodies against NumPy, whole graphs against an independent evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto

from dflash_trt.graph.bindings import LOGITS
from dflash_trt.graph.quantized import (
    LinearFormat,
)
from dflash_trt.quantization.codecs import dequantize_fp8, dequantize_nvfp4
from tests.graph.linears import (
    INPUT_SCALES,
    LINEAR_FORMATS,
    Float32,
    cpu_body,
    decode,
    identity_body,
    random_linear,
    rows_of_all_kinds,
)
from tests.graph.runner import GraphRunner
from tests.pairs import PairFactory, TinyPair
from tests.reference.compare import max_relative_error, stack_error
from tests.reference.generate import forward_with_taps
from tests.reference.quantized import (
    QuantizedReferenceDraft,
    load_quantized_target,
    quantized_modules,
    round_fp8,
    round_nvfp4,
)

Rounding = Callable[[Float32, np.float32], Float32]
ROUND: dict[LinearFormat, Rounding] = {"FP8": round_fp8, "NVFP4": round_nvfp4}
ROWS, BLOCK, SEEDS = 4, 4, 200
BOUND = stack_error(6)
"""Three layers of a target and three of its draft."""


@pytest.mark.parametrize("input_scale", INPUT_SCALES, ids=str)
@pytest.mark.parametrize("algorithm", LINEAR_FORMATS)
def test_the_cpus_body_rounds_inputs_as_the_formats_say(
    algorithm: LinearFormat, input_scale: np.float32, tmp_path: Path
) -> None:
    x = rows_of_all_kinds(32)
    got = identity_body(algorithm, 32, input_scale, tmp_path / "linear.onnx")(x)
    np.testing.assert_array_equal(got, ROUND[algorithm](x, input_scale))


@pytest.mark.parametrize("algorithm", LINEAR_FORMATS)
def test_the_cpus_body_decodes_weights_as_the_formats_say(
    algorithm: LinearFormat, tmp_path: Path
) -> None:
    """Through inputs of a single 6, which stays 6, so that each output is six times one weight."""
    linear = random_linear(algorithm, 48, 128) | {"input_scale": np.float32(1)}
    if algorithm == "FP8":
        codec = dequantize_fp8(linear["weight"].view(np.uint8), linear["weight_scale"])
    else:
        scales = linear["weight_scale"].view(np.uint8)
        codec = dequantize_nvfp4(linear["weight"], scales, linear["weight_scale_2"])
    np.testing.assert_array_equal(codec, decode(algorithm, linear))
    six = np.float32(6)
    got = cpu_body(algorithm, linear, tmp_path / "linear.onnx")(six * np.eye(128, dtype=np.float32))
    np.testing.assert_array_equal(got.T, six * decode(algorithm, linear))


@pytest.mark.parametrize("algorithm", LINEAR_FORMATS)
def test_weights_are_decoded_at_load(
    algorithm: LinearFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left in the optimised graph reads the activation; the weight is one float tensor."""
    linear = random_linear(algorithm, 64, 96) | {"input_scale": np.float32(0.01)}
    real = ort.InferenceSession

    def saving(path: str, options: Any, providers: list[str]) -> Any:
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        return real(path, options, providers=providers)

    monkeypatch.setattr(ort, "InferenceSession", saving)
    cpu_body(algorithm, linear, tmp_path / "linear.onnx")
    graph = onnx.load(tmp_path / "optimised.onnx").graph
    matrices = [t for t in graph.initializer if len(t.dims) == 2 and t.dims[0] > 1]
    assert [(list(t.dims), t.data_type) for t in matrices] == [([64, 96], TensorProto.FLOAT)]
    assert not {"Gather", "DequantizeLinear"} & {node.op_type for node in graph.node}


PAIRS: dict[str, dict[str, Any]] = {
    "qwen3-fp8": {
        "target": {"dtype": "bfloat16", "num_layers": 3, "vocab": 96},
        "draft": {"dtype": "bfloat16", "target_layer_ids": [0, 2]},
        "quantize": {
            "target": {"algorithm": "FP8", "exclude": [], "scalar_shape": (1,)},
            "draft": {"algorithm": "FP8", "form": "nested", "exclude": ["model*"]},
        },
    },
    "llama-nvfp4": {
        "family": "llama",
        "target": {"num_layers": 3, "vocab": 96, "attention_bias": True},
        "draft": {"target_layer_ids": [0, 2]},
        "quantize": {
            "target": {"algorithm": "NVFP4", "kv_cache": True},
            "draft": {"algorithm": "NVFP4", "form": "nested", "exclude": ["model*"]},
        },
    },
    "mixed": {
        "target": {"num_layers": 3, "vocab": 96, "tie": True},
        "draft": {"target_layer_ids": [0, 2]},
        "quantize": {
            "target": {"algorithm": "NVFP4", "exclude": ["lm_head", "model.layers.1.*"]},
            "draft": {"algorithm": "FP8", "exclude": ["fc", "layers.0.self_attn.v_proj"]},
        },
    },
}


@pytest.mark.parametrize("name", list(PAIRS))
def test_graphs_equal_an_independent_evaluation_of_the_same_numbers(
    make_pair: PairFactory, name: str, tmp_path: Path
) -> None:
    """Of rows that no linear rounds where a float's last bits, summed otherwise, were a step."""
    built: TinyPair = make_pair(**PAIRS[name])
    target = quantized_modules(built.folder / "target")
    model = load_quantized_target(built.folder / "target", tmp_path / "plain", target)
    draft = QuantizedReferenceDraft.open(built.folder / "draft", model)
    linears = [*target.values(), *draft.modules.values()]
    for seed in range(SEEDS):
        ids = np.random.default_rng(seed).integers(0, 96, (1, ROWS))
        output, taps = forward_with_taps(model, torch.tensor(ids), draft.config.target_layer_ids)
        context = draft.project(taps)
        block = draft.draft(torch.tensor([5]), ROWS, context, BLOCK)
        if not sum(linear.take_doubts() for linear in linears):
            break
    else:
        pytest.fail("rows of every seed are rounded near a midpoint")
    runner = GraphRunner(built)
    logits = runner.target(ids, [0])[LOGITS]
    assert max_relative_error(logits, output.logits) <= BOUND
    outputs = runner.draft([5], [ROWS], BLOCK)
    for layer, pieces in enumerate(zip(context, block.block_kv, strict=True)):
        for kind, *expected in zip("kv", *pieces, strict=True):
            rows = outputs[f"draft_{kind}_{layer}_out"][:, :, : ROWS + BLOCK]
            assert max_relative_error(rows[:, :, :ROWS], expected[0]) <= BOUND
            assert max_relative_error(rows[:, :, ROWS:], expected[1]) <= BOUND

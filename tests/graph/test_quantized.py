"""Quantised linears: the CPU's body against NumPy, graphs against an independent evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, numpy_helper

from dflash_trt.backends.base import Scores, TargetCall
from dflash_trt.backends.onnxruntime.session import open_session
from dflash_trt.graph.bindings import LOGITS
from dflash_trt.graph.quantized import LinearFormat, linear_function, round_function
from dflash_trt.quantization.linears import ALL_EXPERTS
from tests.covering import exhaustive
from tests.graph.functions import builder
from tests.graph.runner import GraphRunner
from tests.pairs import PairFactory, TinyPair
from tests.reference.compare import max_relative_error, stack_error
from tests.reference.generate import forward_with_taps
from tests.reference.quantized import (
    QuantizedReferenceDraft,
    decode_fp8,
    decode_nvfp4,
    load_quantized_target,
    quantized_modules,
    round_fp8,
    round_nvfp4,
)

Float32 = npt.NDArray[np.float32]
LINEAR_FORMATS: tuple[LinearFormat, ...] = ("FP8", "NVFP4")
INPUT_SCALES = [np.float32(s) for s in (1.0, 5 / 448, 17.0)]


def random_linear(algorithm: LinearFormat, rows: int, columns: int) -> dict[str, Any]:
    """Tensors of a linear of random codes, by the functions' parameter names."""
    generator = np.random.default_rng(rows)
    if algorithm == "FP8":
        codes = generator.integers(0, 256, (rows, columns), np.uint8)
        codes[codes & 0x7F == 0x7F] = 0  # NaN
        return {"weight": codes.view(ml_dtypes.float8_e4m3fn), "weight_scale": np.float32(0.0037)}
    return {
        "weight": generator.integers(0, 256, (rows, columns // 2), np.uint8),
        "weight_scale": generator.integers(1, 127, (rows, columns // 16), np.uint8).view(
            ml_dtypes.float8_e4m3fn
        ),
        "weight_scale_2": np.float32(0.00071),
    }


def decode(algorithm: LinearFormat, linear: dict[str, Any]) -> Float32:
    if algorithm == "FP8":
        return decode_fp8(linear["weight"], linear["weight_scale"])
    return decode_nvfp4(linear["weight"], linear["weight_scale"], linear["weight_scale_2"])


def call_model(algorithm: LinearFormat, linear: dict[str, Any], columns: int) -> onnx.ModelProto:
    rounding, product = round_function(algorithm), linear_function(algorithm)
    b = builder()
    b.input("x", TensorProto.FLOAT, ["T", columns])
    b.output("y", TensorProto.FLOAT, ["T", "out"])
    b.call(rounding, list(rounding.input), "round", outputs=list(rounding.output))
    b.call(product, list(product.input), "product", outputs=["y"])
    model = b.finish()
    for name, value in linear.items():
        tensor = numpy_helper.from_array(np.asarray(value), name)
        model.graph.initializer.append(tensor)
    return model


def cpu_body(algorithm: LinearFormat, linear: dict[str, Any], path: Path) -> Callable[[Any], Any]:
    columns = decode(algorithm, linear).shape[1]
    path.write_bytes(call_model(algorithm, linear, columns).SerializeToString())
    session = open_session(path, 1)
    return lambda x: session.run(None, {"x": x})[0]


def rows_of_all_kinds(columns: int) -> Float32:
    """Every bfloat16, float32 of all magnitudes, exact midpoints, zero blocks, clipped values."""
    generator = np.random.default_rng(1)
    bfloat16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    bfloat16 = bfloat16[np.abs(bfloat16) < 1e30]
    scales = generator.choice(np.float32([1e-6, 1e-3, 1, 40, 3000]), (2000, 1))
    wide = generator.standard_normal((2000, columns), np.float32) * scales
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    grid = np.sort(codes[np.isfinite(codes)])
    midpoints = (grid[1:] + grid[:-1]) / 2
    neighbours = [midpoints, np.nextafter(midpoints, np.float32(1e9)), grid / 448 * 6]
    ties = generator.choice(np.concatenate(neighbours), (2000, columns))
    ties[::3] = generator.choice(np.arange(-32, 33) / np.float32(4), ties[::3].shape)
    ties[::3, ::16] = 6  # the block's step is then 1 where the input scale is
    sparse = np.where(generator.random((500, columns)) < 0.02, wide[:500], 0)
    rows = [bfloat16[: len(bfloat16) // columns * columns].reshape(-1, columns), wide, ties, sparse]
    return np.concatenate(rows).astype(np.float32)


def identity_body(
    algorithm: LinearFormat, size: int, input_scale: np.float32, path: Path
) -> Callable[[Any], Any]:
    """The CPU's body over an identity weight: its output is the rounded input itself."""
    codes = np.eye(size, dtype=np.float32)
    linear: dict[str, Any] = {"weight_scale": np.float32(1)}
    if algorithm == "FP8":
        linear["weight"] = codes.astype(ml_dtypes.float8_e4m3fn)
    else:
        nibbles = (codes * 2).astype(np.uint8)
        linear["weight"] = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
        linear["weight_scale"] = np.ones((size, size // 16), ml_dtypes.float8_e4m3fn)
        linear["weight_scale_2"] = np.float32(1)
    linear["input_scale"] = input_scale
    return cpu_body(algorithm, linear, path)


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
def test_the_cpus_body_decodes_weights_at_load_as_the_formats_say(
    algorithm: LinearFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through inputs of a single 6, which stays 6, so that each output is six times one weight.

    What is left in the optimised graph reads the activation; the weight is one float tensor.
    """
    linear = random_linear(algorithm, 48, 128) | {"input_scale": np.float32(1)}
    real = ort.InferenceSession

    def saving(path: str, options: Any, providers: list[str]) -> Any:
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        return real(path, options, providers=providers)

    monkeypatch.setattr(ort, "InferenceSession", saving)
    six = np.float32(6)
    got = cpu_body(algorithm, linear, tmp_path / "linear.onnx")(six * np.eye(128, dtype=np.float32))
    np.testing.assert_array_equal(got.T, six * decode(algorithm, linear))
    graph = onnx.load(tmp_path / "optimised.onnx").graph
    matrices = [t for t in graph.initializer if len(t.dims) == 2 and t.dims[0] > 1]
    assert [(list(t.dims), t.data_type) for t in matrices] == [([48, 128], TensorProto.FLOAT)]
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


VOCAB, SUMS_BOUND = 96, 1e-5
"""No value is rounded to another code, so what is left is the order of sums."""
HYBRID: dict[str, Any] = {"vocab": VOCAB, "num_layers": 4, "head_dim": 32}
GEMMA: dict[str, Any] = {"vocab": VOCAB, "num_layers": 3, "tie": True}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
RECURRENT = {"in_proj_qkv", "in_proj_z", "out_proj"}
TARGETS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "qwen3_5": (HYBRID, ATTENTION | MLP | RECURRENT),
    "qwen3_5_moe": (HYBRID | {"experts": 4}, ATTENTION | MLP | RECURRENT),
    "gemma4": (GEMMA, ATTENTION | MLP),
    "gemma4_moe": (GEMMA, ATTENTION | MLP),
}


@pytest.mark.parametrize(
    ("family", "algorithm"),
    [
        ("qwen3_5", "NVFP4"),
        ("gemma4_moe", "FP8"),
        exhaustive("qwen3_5", "FP8"),
        exhaustive("qwen3_5_moe", "NVFP4"),
        exhaustive("qwen3_5_moe", "FP8"),
        exhaustive("gemma4", "NVFP4"),
        exhaustive("gemma4", "FP8"),
        exhaustive("gemma4_moe", "NVFP4"),
    ],
)
def test_quantised_linears_equal_an_independent_evaluation(
    make_pair: PairFactory, family: Any, algorithm: str, tmp_path: Path
) -> None:
    """Row by row in transformers, over rows that no linear rounds near a midpoint of two codes.

    Attention, recurrent projections, MLPs and the expert that all rows share are quantised; gates,
    routers and experts that rows choose are not.
    """
    target, expected = TARGETS[family]
    exclude = ["lm_head", "mtp*", ALL_EXPERTS]
    quantize = {"target": {"algorithm": algorithm, "exclude": exclude}}
    built = make_pair(family, target, {"target_layer_ids": [0, 2]}, quantize=quantize)
    modules = quantized_modules(built.folder / "target")
    assert {name.rpartition(".")[2] for name in modules} == expected
    assert not any(".experts." in name for name in modules)
    model = load_quantized_target(built.folder / "target", tmp_path / "plain", modules)
    for seed in range(SEEDS):
        ids = np.random.default_rng(seed).integers(0, VOCAB, (1, ROWS))
        cache, want = None, []
        for row in range(ROWS):
            given = torch.tensor(ids[:, row : row + 1])
            with torch.no_grad():
                output = model(given, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            want.append(output.logits)
        if not sum(linear.take_doubts() for linear in modules.values()):
            break
    else:
        pytest.fail("rows of every seed are rounded near a midpoint")
    picked = np.arange(ROWS)[None]
    call = TargetCall("target", 0, ids, np.zeros(1, np.int64), picked, Scores.LOGITS)
    logits = built.open().forward(call).logits
    assert logits is not None
    assert max_relative_error(logits, torch.cat(want, dim=1)) <= SUMS_BOUND

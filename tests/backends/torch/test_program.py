"""What PyTorch's executor refuses, each in one line: machines, graphs, weights."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from dflash_plugins.testing.numeric import epsilon, sum_error

from dflash_trt.backends.registry import check_torch
from dflash_trt.backends.torch import open_torch
from dflash_trt.backends.torch.fused import quantize_fp4
from dflash_trt.backends.torch.program import Kept, Program
from dflash_trt.backends.torch.weights import Weights
from dflash_trt.errors import DflashError
from dflash_trt.graph.quantized import round_function

_HEAD = '<ir_version: 11, opset_import: ["": 24, "own": 1]>\ng (float[N] x) => (float[N] y)\n'


def load(folder: Path, nodes: str, *weights: onnx.TensorProto) -> Program:
    model = onnx.parser.parse_model(f"{_HEAD}{{ {nodes} }}")
    model.graph.initializer.extend(weights)
    held = Weights(folder, torch.device("cpu"))
    return Program(model, held, (), lambda node, tensors: tensors)


def weight(place: str, count: int, *, offset: int = 4) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[count], data_location=1)
    for key, value in (("location", place), ("offset", offset), ("length", 4 * count)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def test_a_weight_is_read_from_its_place_and_shapes_are_kept(tmp_path: Path) -> None:
    np.arange(5, dtype=np.float32).tofile(tmp_path / "w.bin")
    text = "s = Shape (x)\nb = Expand (w, s)\nz = Add (b, w)\ny = Add (x, z)"
    program, kept = load(tmp_path, text, weight("w.bin", 3)), Kept()
    for _ in range(2):
        made = program.run({"x": torch.tensor([1.0, 2.0, 3.0])}, kept)
        assert made["y"].tolist() == [3.0, 6.0, 9.0]
    assert kept.statics.keys() == {"s", "b", "z"}
    with pytest.raises(DflashError, match=r"^g\.onnx: PyTorch cannot run Expand .*\n?$"):
        program.run({"x": torch.zeros(2)}, Kept())


def test_fp8_codes_are_multiplied_where_the_device_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's product of codes stands for a GPU's: bfloat16 sums, rounded once."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 120, (32, 64)).astype(np.uint8)
    scales = {"s": 0.05, "w_s": 0.002}
    w = onnx.helper.make_tensor("w", 17, codes.shape, codes.tobytes(), raw=True)
    held = [onnx.helper.make_tensor(name, 1, [], [one]) for name, one in scales.items()]
    text = """
    x_2 = Reshape (x, rows)
    body = QuantizeLinear <output_dtype = 17> (x_2, s)
    x_hat = DequantizeLinear <output_dtype = 16> (body, s)
    w_hat = DequantizeLinear <output_dtype = 16> (w, w_s)
    product = Gemm <transB = 1> (x_hat, w_hat)
    flat = Reshape (product, all)
    y = Cast <to = 1> (flat)"""
    held += [
        onnx.numpy_helper.from_array(np.array(v), n) for n, v in (("rows", [-1, 64]), ("all", [-1]))
    ]
    x = torch.from_numpy(rng.normal(size=5 * 64).astype(np.float32))
    plain = load(tmp_path, text, w, *held)
    monkeypatch.setattr(
        "dflash_trt.backends.torch.weights.has_scaled_products", lambda device: True
    )
    scaled = load(tmp_path, text, w, *held)
    assert [one.operation for one in scaled._nodes].count("ScaledGemm") == 1
    assert "DequantizeLinear" not in {one.operation for one in scaled._nodes}
    a, b = (one.run({"x": x}, Kept())["y"] for one in (plain, scaled))
    assert (a - b).abs().max() <= sum_error(3, 1.0, epsilon(ml_dtypes.bfloat16)) * a.abs().max()


@pytest.mark.parametrize(
    ("nodes", "tensors", "reason"),
    [
        ("y = own.Ask (x)", [], "own::Ask, which"),
        ("y = Loop (x)", [], "ai.onnx::Loop, which"),
        ("z = Add (x, x)", [], "never makes y"),
        ("y = Add (x, w)", [weight("w.bin", 30)], "w does not lie in a file"),
        ("y = Add (x, w)", [weight("w.bin", 3, offset=-4)], "w does not lie in a file"),
        ("y = Add (x, w)", [weight("none.bin", 3)], "none.bin: no such file"),
        ("y = Add (x, w)", [weight("../w.bin", 3)], "w.bin"),
        ("y = Add (x, w)", [onnx.TensorProto(name="w", data_type=8)], "w is STRING"),
    ],
)
def test_graphs_are_refused_as_they_are_loaded(
    nodes: str, tensors: list[onnx.TensorProto], reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    for place in (folder, tmp_path):
        np.zeros(5, np.float32).tofile(place / "w.bin")
    with pytest.raises(DflashError, match=reason) as caught:
        load(folder, nodes, *tensors)
    assert "\n" not in caught.value.message


def test_constants_of_constants_are_made_in_time_that_ends(tmp_path: Path) -> None:
    """Each of the two before it: made anew for each, the last takes 2^60 additions."""
    nodes = ["a0 = Constant <value_float = 1.0> ()", "a1 = Identity (a0)"]
    nodes += [f"a{at} = Sub (a{at - 1}, a{at - 2})" for at in range(2, 89)]
    program = load(tmp_path, "\n".join([*nodes, "y = Add (x, a88)"]))
    assert program.run({"x": torch.zeros(2)}, Kept())["y"].tolist() == [-1.0, -1.0]


def test_values_that_nobody_makes_are_named(tmp_path: Path) -> None:
    program = load(tmp_path, "t, z = Add (x, x)\ny = Add (t, z)")
    with pytest.raises(DflashError, match=r"cannot run Add .*z"):
        program.run({"x": torch.zeros(2)}, Kept())


def test_an_attribute_that_nobody_knows_is_not_passed_over(tmp_path: Path) -> None:
    program = load(tmp_path, "t = Softmax <what = 1> (x)\ny = Identity (t)")
    with pytest.raises(DflashError, match="cannot run Softmax"):
        program.run({"x": torch.zeros(2)}, Kept())


def test_four_bits_are_those_of_the_cpus_function() -> None:
    """NVFP4 as engines' graphs have it, blocks of nothing and of the largest among them."""
    function, opset = round_function("NVFP4"), onnx.helper.make_opsetid("", 24)
    node = onnx.helper.make_node("nvfp4_round", ["x", "s"], ["y"], domain="dflash")
    kinds = {name: onnx.helper.make_tensor_value_info(name, 1, None) for name in "xsy"}
    graph = onnx.helper.make_graph([node], "g", [kinds["x"], kinds["s"]], [kinds["y"]])
    opsets = [opset, onnx.helper.make_opsetid("dflash", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, functions=[function])
    program = Program(model, Weights(Path(), torch.device("cpu")), (), lambda node, tensors: [])
    torch.manual_seed(0)
    x, scale = torch.randn(64, 128) * 4 ** torch.randn(64, 1), torch.tensor(0.01)
    x[0], x[1] = 0.0, 1e4
    codes, scales = quantize_fp4(x, scale, -1, 16, 17)
    steps = (scales.float() * scale).repeat_interleave(16, -1)
    assert torch.equal(program.run({"x": x, "s": scale}, Kept())["y"], codes * steps)


class _Old:
    """A GPU with a capability of its own."""

    name = "Old GPU"
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_old_gpus_and_missing_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = _Old()
    cuda = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda index: (7, 5))
    monkeypatch.setattr(open_torch.torch, "cuda", cuda)
    monkeypatch.setattr(open_torch, "Device", lambda: device)
    with pytest.raises(DflashError, match=r"capability 7\.5; PyTorch's executor needs 8\.0"):
        check_torch()
    assert device.is_closed
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DflashError, match="--executor torch needs torch") as caught:
        check_torch()
    assert caught.value.fix and "torch" in caught.value.fix

"""Random quantised linears and their decoding in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper

from dflash_trt.backends.onnxruntime.session import open_session
from dflash_trt.graph.quantized import LinearFormat, linear_function, round_function
from tests.graph.functions import builder
from tests.reference.quantized import decode_fp8, decode_nvfp4

Float32 = npt.NDArray[np.float32]

LINEAR_FORMATS: tuple[LinearFormat, ...] = ("FP8", "NVFP4")
INPUT_SCALES = [np.float32(s) for s in (1.0, 0.0123, 5 / 448, 3e-5, 17.0)]


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

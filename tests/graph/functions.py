"""Models around one function of the graphs, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto

from dflash_trt.graph.model import GraphBuilder

FloatArray = npt.NDArray[np.float32]


def builder() -> GraphBuilder:
    return GraphBuilder("test", lambda entry: entry.file.name)


def run(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[npt.NDArray[Any]]:
    onnx.checker.check_model(model, full_check=True)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, feeds))


def random(seed: int, *shape: int) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


Array = npt.NDArray[Any]


KINDS: dict[Any, int] = {
    np.float32: TensorProto.FLOAT,
    np.float16: TensorProto.FLOAT16,
    np.int32: TensorProto.INT32,
    np.int64: TensorProto.INT64,
    ml_dtypes.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
}


def run_function(
    function: onnx.FunctionProto, feeds: Mapping[str, Array], **attributes: Any
) -> list[Array]:
    """A function's outputs; codes are uint8."""
    b = builder()
    for name, array in feeds.items():
        b.input(name, KINDS[array.dtype.type], array.shape)
    results = [f"result_{name}" for name in function.output]
    for name in results:  # caches come last
        like = feeds["q"] if "attended" in name else feeds[name.split("_", 1)[1][:-4]]
        b.output(name, KINDS[like.dtype.type], like.shape)
    b.call(function, list(function.input), "call", outputs=results, **attributes)
    session = ort.InferenceSession(
        b.finish().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    given = {}
    for name, array in feeds.items():
        is_code = array.dtype.type is ml_dtypes.float8_e4m3fn
        value = array.view(np.uint8) if is_code else array
        given[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
            np.ascontiguousarray(value), KINDS[array.dtype.type]
        )
    return [value.numpy() for value in session.run_with_ort_values(None, given)]

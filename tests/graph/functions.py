"""Models around one function of the graphs, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from dflash_trt.graph.functions import IR_VERSION
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
    np.bool_: TensorProto.BOOL,
    np.float32: TensorProto.FLOAT,
    np.float16: TensorProto.FLOAT16,
    np.int32: TensorProto.INT32,
    np.int64: TensorProto.INT64,
    ml_dtypes.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
}


def run_function(
    function: onnx.FunctionProto, feeds: Mapping[str, Array], **attributes: Any
) -> list[Array]:
    """A function's outputs over its own of the `feeds`; codes are uint8."""
    arrays = {name: np.ascontiguousarray(feeds[name]) for name in function.input}
    kinds = {name: KINDS[array.dtype.type] for name, array in arrays.items()}
    inputs = [
        helper.make_tensor_value_info(name, kinds[name], array.shape)
        for name, array in arrays.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in function.output]
    node = helper.make_node(
        function.name,
        list(function.input),
        list(function.output),
        domain=function.domain,
        overload=function.overload or None,
        **attributes,
    )
    imports = [*function.opset_import, helper.make_opsetid(function.domain, 1)]
    model = helper.make_model(
        helper.make_graph([node], "function", inputs, outputs),
        opset_imports=imports,
        functions=[function],
        ir_version=IR_VERSION,
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    given = {
        name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
            array.view(np.uint8) if kinds[name] == TensorProto.FLOAT8E4M3FN else array, kinds[name]
        )
        for name, array in arrays.items()
    }
    return [value.numpy() for value in session.run_with_ort_values(None, given)]

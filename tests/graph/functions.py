"""Sessions of ONNX Runtime, of one function too; what attention is, by loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from dflash_trt.graph.bindings import Dim
from dflash_trt.graph.model import GraphBuilder

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]
FLOAT8 = ml_dtypes.float8_e4m3fn


def run_session(session: ort.InferenceSession, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Every output by its name; arrays of FP8 codes go in and come out as such."""
    io, given = session.io_binding(), {n: np.ascontiguousarray(a) for n, a in feeds.items()}
    for name, array in given.items():
        kind = array.dtype.type
        element = TensorProto.FLOAT8E4M3FN if kind is FLOAT8 else kind
        io.bind_input(name, "cpu", 0, element, array.shape, array.ctypes.data)
    outputs = session.get_outputs()
    for output in outputs:
        io.bind_output(output.name)
    session.run_with_iobinding(io)
    return {
        output.name: value.numpy().view(FLOAT8) if "float8" in output.type else value.numpy()
        for output, value in zip(outputs, io.get_outputs(), strict=True)
    }


def builder() -> GraphBuilder:
    return GraphBuilder("test", lambda entry: entry.file.name)


def random(seed: int, *shape: int) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def open_model(b: GraphBuilder, outputs: Sequence[str]) -> ort.InferenceSession:
    """A session of one thread that gives the values `outputs`."""
    model = b.finish()
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def open_function(
    function: onnx.FunctionProto, types: Mapping[str, tuple[int, Sequence[Dim]]], **attributes: Any
) -> ort.InferenceSession:
    """A call of `function`; operands that have no type in `types` are left out."""
    b = builder()
    for name, (element_type, shape) in types.items():
        b.input(name, element_type, shape)
    operands = [name if name in types else "" for name in function.input]
    results = [f"result_{name}" for name in function.output]
    b.call(function, operands, "call", outputs=results, **attributes)
    return open_model(b, results)


def run_function(
    function: onnx.FunctionProto, feeds: Mapping[str, Array], **attributes: Any
) -> list[Array]:
    """A function's outputs over its own of the `feeds`; codes are uint8."""
    arrays = {name: np.ascontiguousarray(feeds[name]) for name in function.input if name in feeds}
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in arrays.items()}
    types = {name: (kinds[name], array.shape) for name, array in arrays.items()}
    given = {}
    for name, array in arrays.items():
        is_code = array.dtype.type is FLOAT8
        value = array.view(np.uint8) if is_code else array
        given[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(value, kinds[name])
    session = open_function(function, types, **attributes)
    return [value.numpy() for value in session.run_with_ort_values(None, given)]

"""A graph function's body, run by ONNX Runtime: what kernels are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from dflash_plugins.operation import Attributes, DType
from dflash_plugins.testing.numeric import Array
from onnx import TensorProto, helper

from dflash_trt.graph.functions import IR_VERSION

TYPES = {
    DType.FLOAT32: TensorProto.FLOAT,
    DType.FLOAT16: TensorProto.FLOAT16,
    DType.BFLOAT16: TensorProto.BFLOAT16,
    DType.FLOAT8: TensorProto.FLOAT8E4M3FN,
    DType.INT32: TensorProto.INT32,
    DType.INT64: TensorProto.INT64,
}


def run_body(
    function: onnx.FunctionProto, inputs: Mapping[str, Array], attributes: Attributes
) -> list[Array]:
    """Outputs of `function` over `inputs`, which are in its own order."""
    kinds = {dtype.numpy: kind for dtype, kind in TYPES.items()}
    kinds[np.dtype(bool)] = TensorProto.BOOL
    values = [
        helper.make_tensor_value_info(name, kinds[array.dtype], array.shape)
        for name, array in zip(function.input, inputs.values(), strict=True)
    ]
    node = helper.make_node(
        function.name,
        list(function.input),
        list(function.output),
        domain=function.domain,
        overload=function.overload or None,
        **attributes,
    )
    outputs = [onnx.ValueInfoProto(name=name) for name in function.output]
    graph = helper.make_graph([node], "body", values, outputs)
    imports = [*function.opset_import, helper.make_opsetid(function.domain, 1)]
    model = helper.make_model(
        graph, opset_imports=imports, functions=[function], ir_version=IR_VERSION
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds = dict(zip(function.input, inputs.values(), strict=True))
    results: list[Any] = session.run(None, feeds)
    return [np.asarray(result) for result in results]

"""onnx's full check of a graph whose weights live outside it."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from dflash_trt.errors import DflashError, one_line


def check_graph(model: onnx.ModelProto) -> None:
    """Runs onnx's checker with strict type and shape inference.

    onnx refuses external data that is hard-linked, so the check runs on a copy whose external
    initializers are graph inputs of the same type and shape.

    Raises:
        DflashError: the checker's complaint. It would be a defect of the graph builder.
    """
    name = model.graph.name
    try:
        onnx.checker.check_model(_with_weights_as_inputs(model), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise DflashError(
            f"the built graph does not pass onnx's check: {one_line(error)}", where=f"{name}.onnx"
        ) from error


def _with_weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    internal = []
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            copy.graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
        else:
            internal.append(tensor)
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(internal)
    return copy

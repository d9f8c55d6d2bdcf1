"""Does this processor give a row of an eight-bit product the same bits alone and among others?

ONNX Runtime chooses a kernel by processor, and some choose another for one row. So each size that
a graph has is tried before the graph is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from dflash_trt.core.formats import INT8_BLOCK, INT8_COLUMNS
from dflash_trt.errors import DflashError
from dflash_trt.graph.functions import CONTRIB_DOMAIN, IR_VERSION, OPSET
from dflash_trt.graph.quantized import MATMUL_NBITS, nbits_facts
from dflash_trt.quantization.codecs import quantize_int8

ROWS = (2, 3, 8)
_TILE = 64
"""Kernels take columns in tiles, no larger, each by itself: what they do follows from a tile and
the rest behind the last."""


def check_products(model: onnx.ModelProto, where: Path, threads: int | None) -> None:
    """Refuses a graph with a product in which a row's bits depend on how many rows there are.

    Raises:
        DflashError: names the product's size; a product in another form than those built here.
    """
    for columns, rows in sorted({*_sizes(model.graph.node)}):
        if not (rows > 0 and 0 < columns <= INT8_COLUMNS and columns % INT8_BLOCK == 0):
            what, fix = "has a narrow product in a form that is not known", "build the bundle again"
            raise DflashError(what, where=where, fix=fix)
        rest = _TILE + rows % _TILE if rows > _TILE else rows
        count = first_difference(columns, rest, threads)
        if count is not None:
            raise DflashError(
                f"this processor gives a row of an eight-bit product, {columns} → {rows}, other "
                f"bits among {count} rows than alone",
                where=where,
                fix="build the bundle without --precision int8",
            )


def _sizes(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[int, int]]:
    """K and N of each eight-bit product, of those in loops too; 0 and 0 of one in another form."""
    for node in nodes:
        if node.op_type == MATMUL_NBITS:
            facts: dict[str, Any] = {one.name: one.i for one in node.attribute}
            columns, rows = facts.get("K", 0), facts.get("N", 0)
            is_ours = {"domain": node.domain, **facts} == nbits_facts(rows, columns)
            yield (columns, rows) if is_ours else (0, 0)
        for one in node.attribute:
            yield from _sizes(one.g.node)


@cache
def first_difference(columns: int, rows: int, threads: int | None = None) -> int | None:
    """The first of ROWS among which a row times a matrix [rows, columns] differs from it alone."""
    random = np.random.default_rng(columns)
    inputs = random.standard_normal((max(ROWS), columns), np.float32)
    inputs[1] *= 100
    weights: tuple[npt.NDArray[Any], ...] = quantize_int8(
        random.standard_normal((rows, columns), np.float32)
    )
    names = ("codes", "steps", "zeros")
    node = helper.make_node(MATMUL_NBITS, ["x", *names], ["y"], **nbits_facts(rows, columns))
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "probe",
        [info("x", TensorProto.FLOAT, ["T", columns])],
        [info("y", TensorProto.FLOAT, ["T", rows])],
        [numpy_helper.from_array(one, name) for one, name in zip(weights, names, strict=True)],
    )
    domains = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=IR_VERSION)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or 0
    content, providers = model.SerializeToString(), ["CPUExecutionProvider"]
    session = ort.InferenceSession(content, options, providers=providers)

    def bits(x: npt.NDArray[np.float32]) -> bytes:
        (y,) = session.run(None, {"x": x})
        return bytes(y.tobytes())

    alone = [bits(row[None]) for row in inputs]
    return next((count for count in ROWS if bits(inputs[:count]) != b"".join(alone[:count])), None)

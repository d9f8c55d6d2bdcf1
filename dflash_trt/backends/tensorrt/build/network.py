"""What TensorRT's parser made of a graph: counted, and held to what the graph asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto

from dflash_trt.checkpoints.quantization import LinearFormat
from dflash_trt.errors import DflashError, first_few
from dflash_trt.graph.moe import MOE

ATTENTION = "TRT_Attention"
GEMM = "Gemm"
# The parser lets no attention decompose: a network that builds with these layers and no softmax is
# fused throughout.
ATTENTION_LAYER = "ATTENTION_INPUT"
CACHE_LAYER = "KV_CACHE_UPDATE"
SOFTMAX_LAYERS = ("SOFTMAX", "RAGGED_SOFTMAX")
# TensorRT takes a product of two dequantised operands, cast or not, as one FP8 or FP4 product.
DEQUANTIZE_LAYER, CAST_LAYER, MATMUL_LAYER = "DEQUANTIZE", "CAST", "MATRIX_MULTIPLY"
QUANTIZED_TYPES: dict[str, LinearFormat] = {"FP8": "FP8", "FP4": "NVFP4"}
STORED_TYPES: dict[int, LinearFormat] = {
    TensorProto.FLOAT8E4M3FN: "FP8",
    TensorProto.FLOAT4E2M1: "NVFP4",
}
NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """An input or output of an engine; a dynamic axis has the name of its symbol."""

    name: str
    dtype: str
    shape: list[int | str]


@dataclass(frozen=True, slots=True)
class NetworkSummary:
    """A parsed network: layer counts by type, and what matters most among them by name.

    `attentions` are the native attention layers, `cache_updates` the caches updated in place,
    `quantized_products` the algorithm of each product of two dequantised operands.
    """

    layers: dict[str, int]
    attentions: list[str]
    cache_updates: list[str]
    quantized_products: dict[str, LinearFormat]
    inputs: list[TensorSummary]
    outputs: list[TensorSummary]


def summarize_network(network: Any) -> NetworkSummary:
    """Counts and names of a TensorRT network definition."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    by_type = Counter(str(layer.type.name) for layer in layers)
    return NetworkSummary(
        layers=dict(sorted(by_type.items())),
        attentions=[layer.name for layer in layers if layer.type.name == ATTENTION_LAYER],
        cache_updates=[
            layer.get_input(0).name for layer in layers if layer.type.name == CACHE_LAYER
        ],
        quantized_products=_quantized_products(layers),
        inputs=[_tensor(network.get_input(index)) for index in range(network.num_inputs)],
        outputs=[_tensor(network.get_output(index)) for index in range(network.num_outputs)],
    )


def check_network(
    model: onnx.ModelProto, summary: NetworkSummary, plugin_caches: Collection[str] = ()
) -> None:
    """Holds a network to its graph; its layers do not show what updates `plugin_caches`.

    Raises:
        DflashError: names what TensorRT did not take over natively.
    """
    wanted = [node.name for node in model.graph.node if node.op_type == ATTENTION]
    found = tuple(summary.attentions)
    missing = [name for name in wanted if not any(own.startswith(name) for own in found)]
    outputs = {output.name for output in model.graph.output}
    caches = [value.name for value in model.graph.input if f"{value.name}_out" in outputs]
    updates = Counter(summary.cache_updates)
    routers = sum(node.op_type == MOE for node in model.graph.node)
    softmaxes = sum(summary.layers.get(kind, 0) for kind in SOFTMAX_LAYERS) - routers
    unlike = [
        name
        for name, algorithm in _wanted_products(model).items()
        if summary.quantized_products.get(name) != algorithm
    ]
    problems = [
        _listed("no native attention for", missing),
        _listed("no quantised product for", unlike),
        _listed(
            "no in-place update of",
            [name for name in caches if updates[name] != (name not in plugin_caches)],
        ),
        f"{softmaxes} decomposed softmax layers" if softmaxes > 0 else "",
    ]
    if len(found) > len(wanted):
        problems.append(f"{len(found)} attention layers where the graph has {len(wanted)}")
    if any(problems):
        raise DflashError(
            f"TensorRT would run this graph slowly: {', '.join(filter(None, problems))}",
            where=f"{model.graph.name}.onnx",
            fix="another version of it may differ; this one is not used",
        )


def _quantized_products(layers: list[Any]) -> dict[str, LinearFormat]:
    """Products whose operands both come from a dequantisation of one 8 or 4 bit type, by name."""
    makers = {
        layer.get_output(index).name: layer
        for layer in layers
        for index in range(layer.num_outputs)
    }
    found: dict[str, LinearFormat] = {}
    for layer in layers:
        if layer.type.name != MATMUL_LAYER:
            continue
        kinds = {_dequantized_type(layer.get_input(index), makers) for index in range(2)}
        kind = kinds.pop()
        if not kinds and kind in QUANTIZED_TYPES:
            found[layer.get_output(0).name] = QUANTIZED_TYPES[kind]
    return found


def _dequantized_type(tensor: Any, makers: Mapping[str, Any]) -> str | None:
    """The type that `tensor` was dequantised from; None where it was not."""
    layer = makers.get(tensor.name)
    while layer is not None and layer.type.name == CAST_LAYER:
        layer = makers.get(layer.get_input(0).name)
    if layer is None or layer.type.name != DEQUANTIZE_LAYER:
        return None
    return str(layer.get_input(0).dtype.name)


def _wanted_products(model: onnx.ModelProto) -> dict[str, LinearFormat]:
    """The quantised products of a graph, by the name of their result."""
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    makers = {output: node for node in model.graph.node for output in node.output}
    wanted: dict[str, LinearFormat] = {}
    for node in model.graph.node:
        if node.op_type != GEMM:
            continue
        maker = makers.get(node.input[1])
        while maker is not None and maker.op_type == "Cast":
            maker = makers.get(maker.input[0])
        if maker is not None and maker.op_type == "DequantizeLinear":
            wanted[node.output[0]] = STORED_TYPES[types[maker.input[0]]]
    return wanted


def _tensor(tensor: Any) -> TensorSummary:
    shape = [
        size if size >= 0 else str(tensor.get_dimension_name(axis))
        for axis, size in enumerate(tensor.shape)
    ]
    return TensorSummary(tensor.name, str(tensor.dtype.name), shape)


def _listed(label: str, names: list[str]) -> str:
    return f"{label} {first_few(names, NAMES_SHOWN)}" if names else ""

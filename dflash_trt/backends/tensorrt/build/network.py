"""What TensorRT's parser made of a graph: counted, and held to what the graph asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto

from dflash_trt.errors import DflashError, first_few
from dflash_trt.graph.caches.native import DECOMPOSED
from dflash_trt.graph.moe import MOE
from dflash_trt.models.quantization import LinearFormat

ATTENTION, MASK = "TRT_Attention", 3
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
class AttentionSummary:
    """A native attention layer.

    `mask` is the tensor's name, `causal_kind` in `TRT_Attention`'s words.
    """

    name: str
    has_lengths: bool
    mask: str | None
    causal_kind: str


@dataclass(frozen=True, slots=True)
class NetworkSummary:
    """A parsed network: layer counts by type, and what matters most among them by name.

    `attentions` are the native ones, `cache_updates` the caches updated in place,
    `quantized_products` the algorithm of each product of two dequantised operands. Dynamic axes of
    `inputs` and `outputs` have the names of their symbols.
    """

    layers: dict[str, int]
    attentions: list[AttentionSummary]
    cache_updates: list[str]
    quantized_products: dict[str, LinearFormat]
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]


def summarize_network(trt: Any, network: Any) -> NetworkSummary:
    """Counts and names of a TensorRT network definition; `trt` is the library's module."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    by_type = Counter(str(layer.type.name) for layer in layers)
    return NetworkSummary(
        layers=dict(sorted(by_type.items())),
        attentions=[_attention(trt, one) for one in layers if one.type.name == ATTENTION_LAYER],
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

    Every attention reads caches that are longer than their sequences, so each must have the mask of
    its call, and none key/value lengths, by which TensorRT may compute wrong tokens
    (docs/tensorrt.md). A parser that does not know `TRT_Attention` takes its body, whose attention
    has another name.

    Raises:
        DflashError: names what TensorRT did not take over natively, or not as it is.
    """
    wanted = {node.name: node for node in model.graph.node if node.op_type == ATTENTION}
    found = {
        name: next((own for own in summary.attentions if own.name.startswith(name)), None)
        for name in wanted
    }
    outputs = {output.name for output in model.graph.output}
    caches = [value.name for value in model.graph.input if f"{value.name}_out" in outputs]
    updates, products = Counter(summary.cache_updates), _wanted_products(model)
    problems = {
        "no native attention for": [name for name, own in found.items() if own is None],
        "key/value lengths in": [own.name for own in summary.attentions if own.has_lengths],
        "another mask in": [
            name
            for name, own in found.items()
            if own and (own.mask, own.causal_kind) != (wanted[name].input[MASK], "none")
        ],
        "no quantised product for": [
            name for name, one in products.items() if summary.quantized_products.get(name) != one
        ],
        "no in-place update of": [
            name for name in caches if updates[name] != (name not in plugin_caches)
        ],
    }
    told = [
        f"{label} {first_few(names, NAMES_SHOWN)}" for label, names in problems.items() if names
    ]
    own = sum(node.op_type in (MOE, DECOMPOSED) for node in model.graph.node)
    softmaxes = sum(summary.layers.get(kind, 0) for kind in SOFTMAX_LAYERS) - own
    if softmaxes > 0:
        told.append(f"{softmaxes} decomposed softmax layers")
    if (count := len(summary.attentions)) > len(wanted):
        told.append(f"{count} attention layers where the graph has {len(wanted)}")
    if told:
        raise DflashError(
            f"TensorRT would run this graph wrongly or slowly: {', '.join(told)}",
            where=f"{model.graph.name}.onnx",
            fix="another version of it may differ; this one is not used",
        )


def _attention(trt: Any, layer: Any) -> AttentionSummary:
    """What is told of a layer only once Python knows its type, which a network does not tell."""
    layer.__class__ = trt.IAttentionInputLayer
    attention = layer.attention
    return AttentionSummary(
        name=str(attention.name),
        has_lengths=attention.key_value_lengths is not None,
        mask=None if attention.mask is None else str(attention.mask.name),
        causal_kind=str(attention.causal_kind.name).lower(),
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


def _tensor(tensor: Any) -> dict[str, Any]:
    shape = [
        size if size >= 0 else str(tensor.get_dimension_name(axis))
        for axis, size in enumerate(tensor.shape)
    ]
    return {"name": tensor.name, "dtype": str(tensor.dtype.name), "shape": shape}

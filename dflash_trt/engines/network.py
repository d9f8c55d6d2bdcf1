"""What TensorRT's parser made of a graph: counted, and held to what the graph asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import onnx

from dflash_trt.errors import DflashError

ATTENTION = "TRT_Attention"
# Padded attention without a fused kernel is refused by the builder unless it is allowed to
# decompose, which the parser does not allow; a network with these layers and none of softmax
# that builds is therefore fused throughout.
ATTENTION_LAYER = "ATTENTION_INPUT"
CACHE_LAYER = "KV_CACHE_UPDATE"
SOFTMAX_LAYERS = ("SOFTMAX", "RAGGED_SOFTMAX")
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

    `attentions` are the native attention layers, `cache_updates` the caches updated in place.
    """

    layers: dict[str, int]
    attentions: list[str]
    cache_updates: list[str]
    inputs: list[TensorSummary]
    outputs: list[TensorSummary]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
        inputs=[_tensor(network.get_input(index)) for index in range(network.num_inputs)],
        outputs=[_tensor(network.get_output(index)) for index in range(network.num_outputs)],
    )


def check_network(model: onnx.ModelProto, summary: NetworkSummary) -> None:
    """Holds a network to its graph: native attention and in-place caches, all of them.

    Raises:
        DflashError: names what TensorRT did not take over natively.
    """
    wanted = [node.name for node in model.graph.node if node.op_type == ATTENTION]
    found = tuple(summary.attentions)
    missing = [name for name in wanted if not any(own.startswith(name) for own in found)]
    outputs = {output.name for output in model.graph.output}
    caches = [value.name for value in model.graph.input if f"{value.name}_out" in outputs]
    updates = Counter(summary.cache_updates)
    softmaxes = sum(summary.layers.get(kind, 0) for kind in SOFTMAX_LAYERS)
    problems = [
        _listed("no native attention for", missing),
        _listed("no in-place update of", [name for name in caches if updates[name] != 1]),
        f"{softmaxes} decomposed softmax layers" if softmaxes else "",
    ]
    if len(found) > len(wanted):
        problems.append(f"{len(found)} attention layers where the graph has {len(wanted)}")
    if any(problems):
        raise DflashError(
            f"TensorRT-RTX would run this graph slowly: {', '.join(filter(None, problems))}",
            where=f"{model.graph.name}.onnx",
            fix="another TensorRT-RTX version may differ; this one is not used",
        )


def _tensor(tensor: Any) -> TensorSummary:
    shape = [
        size if size >= 0 else str(tensor.get_dimension_name(axis))
        for axis, size in enumerate(tensor.shape)
    ]
    return TensorSummary(tensor.name, str(tensor.dtype.name), shape)


def _listed(label: str, names: list[str]) -> str:
    if not names:
        return ""
    more = len(names) - NAMES_SHOWN
    return f"{label} {', '.join(names[:NAMES_SHOWN])}{f' and {more} more' if more > 0 else ''}"

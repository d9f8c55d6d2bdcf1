"""Calls that this project's kernels run: graphs handed over with them in place of function bodies.

TensorRT finds a plugin by the node's name once the model carries no function of that name, and
PyTorch's executor a kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

import onnx
from dflash_plugins.block_attention.launch import attention_operations
from dflash_plugins.operation import VERSION
from dflash_plugins.row_sample.launch import OPERATIONS as ROW_SAMPLE
from onnx import helper

from dflash_trt.graph.functions import DFLASH_DOMAIN
from dflash_trt.hardware import kernels as attention


def hand_over(model: onnx.ModelProto, plugins: Collection[str]) -> onnx.ModelProto:
    """A copy of `model` with plugins for the functions that `plugins` names, but for attention.

    A function's overload is part of a plugin's name; a plugin has no optional inputs. What takes
    several launches becomes as many plugins.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    named = {name for name in plugins if not name.startswith(attention.BLOCK_ATTENTION)}
    kept = [one for one in model.functions if plugin_name(one) not in named]
    del result.functions[:]
    result.functions.extend(kept)
    for node, name in handed_over(result, named):
        node.op_type = name
        node.ClearField("overload")
        node.input[:] = [name for name in node.input if name]
        _as_plugin(node)
    nodes = [one for node in result.graph.node for one in _as_launches(node, named)]
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    return result


def hand_over_attention(handed: onnx.ModelProto, block_size: int, capacity: int) -> None:
    """Puts this project's kernels in place of every `block_attention` of a model handed over.

    Steps have up to `block_size` rows, caches `capacity` positions.
    """
    inputs = {one.name: one.input for one in handed.functions if _is_attention(one)}
    nodes: list[onnx.NodeProto] = []
    for node in handed.graph.node:
        if not _is_attention(node):
            nodes.append(node)
            continue
        values = dict(zip(inputs[node.op_type], node.input, strict=True))
        attributes = {one.name: int(helper.get_attribute_value(one)) for one in node.attribute}
        nodes += _as_operations(node, values, attributes, block_size, capacity)
    del handed.graph.node[:]
    handed.graph.node.extend(nodes)
    kept = [one for one in handed.functions if not _is_attention(one)]
    del handed.functions[:]
    handed.functions.extend(kept)


def _as_launches(node: onnx.NodeProto, plugins: Collection[str]) -> Iterator[onnx.NodeProto]:
    """`node`; where it is a `row_sample` handed over, after the plugin that reads its rows."""
    first, last = ROW_SAMPLE
    if plugin_name(node) == last.name and first.name in plugins:
        values = dict(zip(last.inputs, node.input, strict=False))
        left = [f"{node.name}/{name}" for name in first.outputs]
        given = [values[name] for name in first.inputs]
        yield _plugin(first.name, given, left, f"{node.name}/{first.name}")
        node.input.extend(left)
        node.output.extend(f"{node.name}/{name}" for name in last.outputs[len(node.output) :])
    yield node


def _as_operations(
    node: onnx.NodeProto,
    values: dict[str, str],
    attributes: dict[str, int],
    block_size: int,
    capacity: int,
) -> Iterator[onnx.NodeProto]:
    """The plugins that compute an attention: one, or its shares and their merge."""
    values |= {"attended": node.output[0]}
    values |= {name: f"{node.name}/{name}" for name in ("shares", "log_sums")}
    attributes |= {"block_size": block_size, "most_splits": attention.most_splits(capacity)}
    operations = attention_operations(
        capacity,
        block_size,
        attributes["window"],
        is_paged="page_table" in values,
        is_quantized="kv_scales" in values,
    )
    for operation in operations:
        yield _plugin(
            operation.name,
            [values[name] for name in operation.inputs],
            [values[name] for name in operation.outputs],
            f"{node.name}/{operation.name}",
            {name: attributes[name] for name in operation.attributes},
        )


def _is_attention(call: onnx.NodeProto | onnx.FunctionProto) -> bool:
    """Whether it is this project's attention, or its definition."""
    name = call.op_type if isinstance(call, onnx.NodeProto) else call.name
    return call.domain == DFLASH_DOMAIN and name.startswith(attention.BLOCK_ATTENTION)


def _plugin(
    kind: str,
    inputs: list[str],
    outputs: list[str],
    name: str,
    attributes: Mapping[str, int] = MappingProxyType({}),
) -> onnx.NodeProto:
    node = helper.make_node(kind, inputs, outputs, name=name, domain=DFLASH_DOMAIN)
    for key, value in attributes.items():
        node.attribute.append(helper.make_attribute(key, value))
    return _as_plugin(node)


def _as_plugin(node: onnx.NodeProto) -> onnx.NodeProto:
    """`node`, told where the parser finds its plugin."""
    node.attribute.append(helper.make_attribute("plugin_namespace", DFLASH_DOMAIN))
    node.attribute.append(helper.make_attribute("plugin_version", VERSION))
    return node


def plugin_name(call: onnx.NodeProto | onnx.FunctionProto) -> str | None:
    """Name of the plugin that may stand for a call or a function; None outside of our domain."""
    if call.domain != DFLASH_DOMAIN:
        return None
    name = call.op_type if isinstance(call, onnx.NodeProto) else call.name
    return f"{name}_{call.overload}" if call.overload else name


def handed_over(
    model: onnx.ModelProto, plugins: Collection[str]
) -> Iterator[tuple[onnx.NodeProto, str]]:
    """The calls that plugins stand for, each with its plugin's name."""
    for node in model.graph.node:
        name = plugin_name(node)
        if name is not None and name in plugins:
            yield node, name

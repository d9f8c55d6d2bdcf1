"""Graphs handed over to TensorRT with this project's plugins in place of function bodies.

A plugin is found by the node's name once the model carries no function of that name. Nothing here
has run on a GPU: the hand-over is tested against a stand-in of the parser, the registration over
NVIDIA's own Python layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import onnx
from dflash_plugins.block_attention.launch import attention_operations
from dflash_plugins.operation import VERSION, KernelCode
from dflash_plugins.row_sample.launch import OPERATIONS as ROW_SAMPLE
from onnx import helper

from dflash_trt.backends.tensorrt.library import Library, OperationForm
from dflash_trt.errors import DflashError, one_line
from dflash_trt.graph.functions import DFLASH_DOMAIN, TRT_DOMAIN
from dflash_trt.hardware import kernels as attention
from dflash_trt.hardware.kernels import kernel_arch

if TYPE_CHECKING:
    from dflash_plugins.registration import PluginRegistration

_registrations: WeakKeyDictionary[Any, PluginRegistration] = WeakKeyDictionary()
"""By plugin module, which takes every operation only once."""


def plugin_arch(arch: str) -> str:
    """The architecture that kernels for `arch` ("sm_100") are compiled for here ("sm_100a").

    Raises:
        DflashError: Triton language is not installed, or there are no kernels for it.
    """
    from dflash_plugins.compile import check_compiler

    check_compiler()
    return kernel_arch(arch)


def register_plugins(library: Library, trt: Any, arch: str, code: KernelCode) -> set[str]:
    """Has TensorRT know every plugin, with kernels for `arch` as `code`; returns their names.

    Raises:
        DflashError: this TensorRT has no plugins of its own kind, or Triton language is missing.
    """
    from dflash_plugins.registration import PluginRegistration
    from dflash_plugins.table import operations

    try:
        plugin = importlib.import_module(f"{library.module}.plugin")
    except ImportError as error:
        raise DflashError(
            f"{library.name} does not load its plugin module: {one_line(error)}",
            where="--plugins",
        ) from error
    known = _registrations.get(plugin)
    if known is None:
        known = _registrations[plugin] = PluginRegistration(trt, plugin, plugin_arch(arch))
        known.register()
    known.arch, known.code = plugin_arch(arch), code
    return set(operations())


def raise_callback_failure() -> None:
    """Raises what a plugin's callback raised inside TensorRT, which keeps it to itself."""
    for registration in list(_registrations.values()):
        registration.raise_failure()


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
    for node, name in _handed_over(result, named):
        node.op_type = name
        node.ClearField("overload")
        node.input[:] = [name for name in node.input if name]
        _as_plugin(node)
    nodes = [one for node in result.graph.node for one in _as_launches(node, named)]
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    return result


def hand_over_attention(
    handed: onnx.ModelProto, block_size: int, capacity: int
) -> None:
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


def operation_forms(handed: onnx.ModelProto, plugins: Collection[str]) -> dict[str, OperationForm]:
    """How TensorRT gets each operation of a model handed over, by name with its overload."""
    forms: dict[str, OperationForm] = {name: "plugin" for _, name in _handed_over(handed, plugins)}
    for function in handed.functions:
        name = f"{function.name}_{function.overload}" if function.overload else function.name
        forms[name] = "native" if function.domain == TRT_DOMAIN else "function"
    return dict(sorted(forms.items()))


def plugin_caches(model: onnx.ModelProto, plugins: Collection[str]) -> list[str]:
    """The caches of `model` that plugins update in place, by input name.

    Raises:
        DflashError: one of them writes a cache's output that is not in the memory of its input.
    """
    from dflash_plugins.table import operations

    known, found = operations(), []
    caches = {f"{value.name}_out": value.name for value in model.graph.input}
    for node, name in _handed_over(model, plugins):
        given = dict(zip(known[name].inputs, filter(None, node.input), strict=False))
        aliased = [given.get(known[name].aliases.get(one, "")) for one in known[name].outputs]
        for alias, output in zip(aliased, node.output, strict=False):
            if output not in caches:
                continue
            if alias != caches[output]:
                raise DflashError(f"{name} would not update {caches[output]} in place")
            found.append(alias)
    return found


def _handed_over(
    model: onnx.ModelProto, plugins: Collection[str]
) -> Iterator[tuple[onnx.NodeProto, str]]:
    """The calls that plugins stand for, each with its plugin's name."""
    for node in model.graph.node:
        name = plugin_name(node)
        if name is not None and name in plugins:
            yield node, name

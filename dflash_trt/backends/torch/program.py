"""Programs: ONNX graphs as nodes that PyTorch runs, one after another.

Shapes are computed on the host, so that nothing in a run waits for the device and a run can be
captured once it has run with the same shapes. What depends on shapes alone is computed in a
context's first run, and kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch
from onnx import helper, inliner
from torch import Tensor

from dflash_trt.backends.torch.operations import OPERATIONS
from dflash_trt.backends.torch.weights import Constant, Weights, from_proto
from dflash_trt.errors import DflashError, one_line
from dflash_trt.graph.functions import TRT_DOMAIN

Starter = Callable[["Node", list[Tensor]], list[Tensor]]
"""Starts the kernel of a node of this project's domain over tensors on the device."""

_SHAPES = ("Shape", "Size")
_RAGGED = ("NonZero", "Unique")
_LOOPS = ("Loop", "Scan")
_DECODED = ["DequantizeLinear"] * 2
MOST_FOLDED = 256
"""Nodes that a constant may be made by, each time that one is made of it."""


@dataclass(slots=True, eq=False)
class Node:
    """One operation; of a loop `body` is what it repeats, with the body's inputs and outputs.

    `drops` are values that nobody reads after it.
    """

    operation: str
    name: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Mapping[str, Any]
    body: tuple[list[Node], Sequence[str], Sequence[str]] | None = None
    is_static: bool = False
    drops: Sequence[str] = ()


@dataclass(slots=True)
class Kept:
    """What a context keeps from run to run: values of shapes, and what went to the device."""

    statics: dict[str, Tensor] = field(default_factory=dict)
    moved: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class Program:
    """A graph with its weights, which `run` runs.

    Args:
        model: the graph.
        kernels: names of the functions that `launch` runs.

    Raises:
        DflashError: it has an operation that is not known, or weights that are not there.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        weights: Weights,
        kernels: Collection[str],
        launch: Starter,
    ) -> None:
        self.name, self._weights, self._launch = f"{model.graph.name}.onnx", weights, launch
        self._kernels = frozenset(kernels)
        self.inputs = {one.name: _shape(one) for one in model.graph.input}
        self.outputs = {one.name: _shape(one) for one in model.graph.output}
        constants = {one.name: weights.constant(one, self.name) for one in model.graph.initializer}
        made = {
            *constants,
            *self.inputs,
            *(name for node in model.graph.node for name in node.output),
        }
        if missing := self.outputs.keys() - made:
            raise DflashError(f"never makes {', '.join(sorted(missing))[:200]}", where=self.name)
        nodes = self._parse(self._inlined(model))
        if weights.has_scaled_products:
            nodes = _with_scaled_products(nodes)
        self._nodes = self._fold(nodes, constants)
        read = {name for node in self._nodes for name in _read_by(node)} | self.outputs.keys()
        self._constants = {
            name: weights.hold(one) for name, one in constants.items() if name in read
        }
        seen = {*self._find_statics(), *self.inputs, *self.outputs}
        for node in reversed(self._nodes):
            last = dict.fromkeys([*_read_by(node), *node.outputs])
            node.drops = [name for name in last if name and name not in seen]
            seen.update(node.drops)

    def run(self, feeds: Mapping[str, Tensor], kept: Kept) -> dict[str, Tensor]:
        """Outputs by name; caches among `feeds` are updated in place. `kept` is of one shape.

        Raises:
            DflashError: an operation fails; names it.
        """
        values, is_first = {**self._constants, **feeds, **kept.statics}, not kept.statics
        self._run(self._nodes, values, kept, is_first=is_first)
        if is_first:
            statics = (name for node in self._nodes if node.is_static for name in node.outputs)
            kept.statics = {name: values[name] for name in statics}
        return {name: values[name] for name in self.outputs}

    def _run(
        self, nodes: Iterable[Node], values: dict[str, Tensor], kept: Kept, *, is_first: bool
    ) -> None:
        for node in nodes:
            if node.is_static and not is_first:
                continue
            try:
                values.update(zip(node.outputs, self._results(node, values, kept), strict=False))
            except DflashError:
                raise
            except Exception as error:  # PyTorch's own classes, and what wrong shapes make of ours
                what = f"PyTorch cannot run {node.operation} ({node.name[:80]}): {one_line(error)}"
                raise DflashError(what, where=self.name) from error
            for name in node.drops:
                values.pop(name, None)

    def _results(self, node: Node, values: dict[str, Tensor], kept: Kept) -> Sequence[Tensor]:
        given: list[Any] = [values[name] if name else None for name in node.inputs]
        if node.body is not None:
            return self._repeat(node, given, values)
        operation, device = OPERATIONS.get(node.operation), self._weights.device
        is_kernel = operation is None or node.operation in self._kernels
        host = () if operation is None or is_kernel else operation.host
        tensors = {at: x for at, x in enumerate(given) if x is not None and at not in host}
        if is_kernel or any(one.device == device for one in tensors.values()):
            for at, one in tensors.items():
                if one.device != device:  # it follows from shapes: the same in each run
                    given[at] = kept.moved.setdefault((id(node), at), one.to(device))
        if operation is None or is_kernel:
            return self._launch(node, given)
        for at in host:
            if at < len(given) and given[at] is not None:
                given[at] = given[at].reshape(-1).tolist()
        while given and given[-1] is None:
            given.pop()
        how = dict(node.attributes)
        if operation.updates:  # a cache where it lies; what a graph made may be read again
            how["in_place"] = node.inputs[0] in self.inputs
        made = operation.run(*given, **how)
        return (made,) if isinstance(made, Tensor) else made

    def _repeat(self, node: Node, given: list[Any], values: dict[str, Tensor]) -> Sequence[Tensor]:
        """ONNX's Loop and Scan, whose trips no turn decides."""
        assert node.body is not None
        nodes, inputs, outputs = node.body
        is_loop = node.operation == "Loop"
        count = len(given) - node.attributes.get("num_scan_inputs", 0)
        carried, items = given[2 * is_loop : count], given[count:]
        stacks: list[list[Tensor]] = [[] for _ in node.outputs[len(carried) :]]
        for turn in range(int(given[0]) if is_loop else len(items[0])):
            own = [torch.tensor(turn), torch.tensor(True)] if is_loop else []
            own += [*carried, *(one[turn] for one in items)]
            scope = values | dict(zip(inputs, own, strict=True))
            self._run(nodes, scope, Kept(), is_first=True)
            made = [scope[name] for name in outputs[is_loop:]]
            carried, scanned = made[: len(carried)], made[len(carried) :]
            for stack, one in zip(stacks, scanned, strict=True):
                stack.append(one)
        return [*carried, *map(torch.stack, stacks)]

    def _inlined(self, model: onnx.ModelProto) -> Iterable[onnx.NodeProto]:
        """Nodes with bodies in place of calls, but those of native attention and of kernels."""
        kept = [
            (one.domain, one.name)
            for one in model.functions
            if one.name in self._kernels or one.domain == TRT_DOMAIN
        ]
        light = onnx.ModelProto()
        light.CopyFrom(model)
        del light.graph.initializer[:]
        try:
            whole = inliner.inline_selected_functions(light, kept, exclude=True)
        except Exception as error:  # the inliner's own classes
            what = f"cannot be written out: {one_line(error)}"
            raise DflashError(what, where=self.name) from error
        return list(whole.graph.node)

    def _parse(self, protos: Iterable[onnx.NodeProto]) -> list[Node]:
        nodes = []
        for proto in protos:
            attributes = {one.name: _attribute(one) for one in proto.attribute}
            graph, known = attributes.pop("body", None), self._kernels | OPERATIONS.keys()
            if proto.op_type not in (_LOOPS if graph is not None else known):
                raise DflashError(
                    f"has {proto.domain or 'ai.onnx'}::{proto.op_type[:60]}, which PyTorch's "
                    "executor does not know",
                    where=self.name,
                    fix="build the bundle again, or for --executor cpu",
                )
            body = None
            if graph is not None:
                inputs, outputs = ([v.name for v in side] for side in (graph.input, graph.output))
                body = (self._parse(graph.node), inputs, outputs)
            sizes = [*proto.input], [*proto.output]
            nodes.append(Node(proto.op_type, proto.name, *sizes, attributes, body))
        return nodes

    def _fold(self, nodes: list[Node], constants: dict[str, Constant]) -> list[Node]:
        """The nodes but those of constants alone, which become constants."""
        left, costs = [], dict[str, int]()
        for node in nodes:
            own = {name: constants.get(name) for name in node.inputs if name}
            cost = 1 + sum(costs.get(name, 0) for name in own)
            is_own = node.body is None and node.operation not in self._kernels
            if not is_own or None in own.values() or cost > MOST_FOLDED:
                left.append(node)
                continue
            costs.update(dict.fromkeys(node.outputs, cost))
            keys = [constants[name][0] if name else "" for name in node.inputs]
            told: list[Any] = [node.operation, sorted(node.attributes.items(), key=str), keys]
            if not keys:  # of a large constant that would tell its ends alone
                told = [self.name, node.outputs]
            key = hashlib.sha256(repr(told).encode()).hexdigest()
            for at, name in enumerate(node.outputs):
                constants[name] = f"{key}:{at}", self._later(node, own, at)
        return left

    def _later(self, node: Node, own: Mapping[str, Any], at: int) -> Callable[[], Tensor]:
        def make() -> Tensor:
            values = {name: one[1]() for name, one in own.items()}
            return self._results(node, values, Kept())[at]

        return make

    def _find_statics(self) -> set[str]:
        """Marks the nodes whose results follow from the inputs' shapes; every value of theirs."""
        static, ragged = set(self._constants), set[str]()  # ragged: shapes that data decide
        for node in self._nodes:
            is_plain = node.body is None and node.operation not in self._kernels
            host = OPERATIONS[node.operation].host if is_plain else ()
            read = {node.inputs[at] for at in host if at < len(node.inputs)} - {""}
            is_ragged = node.operation in _RAGGED or not ragged.isdisjoint(_read_by(node))
            if is_ragged or not read <= static:
                ragged.update(node.outputs)
            elif is_plain and (node.operation in _SHAPES or static.issuperset(_read_by(node))):
                node.is_static = True
                static.update(node.outputs)
        return static


def _with_scaled_products(nodes: list[Node]) -> list[Node]:
    """Products of FP8 codes in place of those of what the codes stand for (graph/quantized.py)."""
    made = {name: node for node in nodes for name in node.outputs}
    for node in nodes:
        decoded = [made.get(name) for name in node.inputs]
        is_linear = node.operation == "Gemm" and node.attributes == {"transB": 1}
        if not is_linear or [one and one.operation for one in decoded] != _DECODED:
            continue
        pair = [one for one in decoded if one is not None]
        (codes, scale), (weight, step) = (one.inputs for one in pair)
        rounding = made.get(codes)  # FP4 has codes of blocks, whose scales have blocks too
        if rounding is not None and rounding.operation == "QuantizeLinear" and weight not in made:
            node.operation, node.inputs = "ScaledGemm", [codes, weight, scale, step]
            node.attributes = {"output_dtype": pair[0].attributes["output_dtype"]}
    read = {name for node in nodes for name in _read_by(node)}
    return [
        one for one in nodes if one.operation != _DECODED[0] or not read.isdisjoint(one.outputs)
    ]


def _read_by(node: Node) -> list[str]:
    """Every value that a node reads, its body's outer ones included."""
    names = [name for name in node.inputs if name]
    if node.body is not None:
        nodes, inputs, outputs = node.body
        own = {*inputs, *(name for one in nodes for name in one.outputs)}
        inner = [*outputs, *(name for one in nodes for name in _read_by(one))]
        names += [name for name in inner if name not in own]
    return names


def _attribute(proto: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(proto)
    if isinstance(value, onnx.TensorProto):
        return from_proto(value, torch.device("cpu"))
    if isinstance(value, bytes):
        return value.decode()
    return list(value) if proto.type in (proto.INTS, proto.FLOATS) else value


def _shape(value: onnx.ValueInfoProto) -> tuple[int, tuple[int | str, ...]]:
    kind = value.type.tensor_type
    return kind.elem_type, tuple(one.dim_param or one.dim_value for one in kind.shape.dim)

"""Programs: ONNX graphs as nodes that PyTorch runs, one after another.

Shapes are computed on the host, so that nothing in a run waits for the device and a run can be
captured once it has run with the same shapes. What depends on shapes alone is computed in a
context's first run, and kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch
from onnx import helper, inliner
from torch import Tensor

from dflash_trt.backends.torch.operations import OPERATIONS, Arguments
from dflash_trt.backends.torch.weights import Constant, Weights, from_proto
from dflash_trt.errors import DflashError, one_line

Launch = Callable[["Node", list[Tensor]], list[Tensor]]
"""Starts the kernel of a node of this project's domain over tensors on the device."""

KEPT_WHOLE = ("trt", "TRT_Attention")
"""A function that is run as it is called; all others, unless kernels run them, by their bodies."""

_SHAPES = ("Shape", "Size")
_RAGGED = ("NonZero", "Unique")
_UPDATES = ("TensorScatter", "ScatterND")


@dataclass(slots=True, eq=False)
class Node:
    """One operation; `body` is that of a loop. `drops` are values that nobody reads after it."""

    operation: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    body: Body | None = None
    is_static: bool = False
    drops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Body:
    """What a loop repeats."""

    nodes: list[Node]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


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
        kernels: Collection[str] = (),
        launch: Launch | None = None,
    ) -> None:
        self.name, self._weights, self._launch = f"{model.graph.name}.onnx", weights, launch
        self._kernels = frozenset(kernels)
        self.inputs = {one.name: _shape(one) for one in model.graph.input}
        self.outputs = {one.name: _shape(one) for one in model.graph.output}
        constants = {one.name: weights.constant(one, self.name) for one in model.graph.initializer}
        nodes = self._fold(self._parse(_inlined(model, kernels, self.name)), constants)
        read = {name for node in nodes for name in _read_by(node)} | self.outputs.keys()
        self._constants = {
            name: weights.hold(one) for name, one in constants.items() if name in read
        }
        self.nodes = nodes
        self._plan_drops(self._find_statics())

    def run(self, feeds: Mapping[str, Tensor], kept: Kept) -> dict[str, Tensor]:
        """Outputs by name; caches among `feeds` are updated in place. `kept` is of one shape.

        Raises:
            DflashError: an operation fails; names it.
        """
        values = {**self._constants, **feeds, **kept.statics}
        is_first = not kept.statics
        self._run(self.nodes, values, kept, is_first=is_first)
        if is_first:
            statics = (name for node in self.nodes if node.is_static for name in node.outputs)
            kept.statics |= {name: values[name] for name in statics if name}
        return {name: values[name] for name in self.outputs}

    def _run(
        self, nodes: Iterable[Node], values: dict[str, Tensor], kept: Kept, *, is_first: bool
    ) -> None:
        for node in nodes:
            if node.is_static and not is_first:
                continue
            try:
                results = self._results(node, values, kept)
            except DflashError:
                raise
            except Exception as error:  # PyTorch's own classes, and what shapes make of ours
                what = f"PyTorch cannot run {node.operation} ({node.name[:80]}): {one_line(error)}"
                raise DflashError(what, where=self.name) from error
            values.update(zip(node.outputs, results, strict=False))
            for name in node.drops:
                del values[name]

    def _results(self, node: Node, values: dict[str, Tensor], kept: Kept) -> list[Tensor]:
        given = [values[name] if name else None for name in node.inputs]
        if node.body is not None:
            return self._repeat(node, node.body, given, values, kept)
        is_kernel = node.operation in self._kernels
        fixed: Collection[int] = () if is_kernel else OPERATIONS[node.operation].host
        device = self._weights.device
        moves = is_kernel or any(
            one is not None and one.device == device and at not in fixed
            for at, one in enumerate(given)
        )
        for at, one in enumerate(given):
            if moves and one is not None and one.device != device and at not in fixed:
                key = (id(node), at)
                if key not in kept.moved:
                    kept.moved[key] = one.to(device)
                given[at] = kept.moved[key]
        if is_kernel:
            assert self._launch is not None
            return self._launch(node, [one for one in given if one is not None])
        # A cache is updated where it lies; what a graph has made itself may be read again.
        in_place = node.operation in _UPDATES and node.inputs[0] in self.inputs
        arguments = Arguments(given, node.attributes, len(node.outputs), in_place)
        made = OPERATIONS[node.operation].run(arguments)
        return list(made) if isinstance(made, (tuple, list)) else [made]

    def _repeat(
        self,
        node: Node,
        body: Body,
        given: list[Tensor | None],
        values: dict[str, Tensor],
        kept: Kept,
    ) -> list[Tensor]:
        """ONNX's Loop and Scan; neither's trips depend on what a turn computes."""
        scanned = node.attributes.get("num_scan_inputs", 0)
        if node.operation == "Loop":
            assert given[0] is not None
            trips, carried, items = int(given[0]), given[2:], list[Any]()
        else:
            carried, items = given[: len(given) - scanned], given[len(given) - scanned :]
            trips = items[0].shape[0]
        stacks: list[list[Tensor]] = [[] for _ in node.outputs[len(carried) :]]
        for turn in range(trips):
            own: list[Any] = [one[turn] for one in items]
            leading = [torch.tensor(turn), torch.tensor(True)] if node.operation == "Loop" else []
            scope = values | dict(zip(body.inputs, [*leading, *carried, *own], strict=True))
            self._run(body.nodes, scope, Kept(), is_first=True)
            made = [scope[name] for name in body.outputs][len(leading) > 0 :]
            carried = list(made[: len(carried)])
            for stack, one in zip(stacks, made[len(carried) :], strict=True):
                stack.append(one)
        return [one for one in carried if one is not None] + [torch.stack(one) for one in stacks]

    def _parse(self, protos: Iterable[onnx.NodeProto]) -> list[Node]:
        nodes = []
        for proto in protos:
            attributes = {one.name: _attribute(one) for one in proto.attribute}
            bodies = [one for one in attributes.values() if isinstance(one, onnx.GraphProto)]
            known = proto.op_type in OPERATIONS or proto.op_type in self._kernels
            if not known and not (bodies and proto.op_type in ("Loop", "Scan")):
                raise DflashError(
                    f"has {proto.domain or 'ai.onnx'}::{proto.op_type[:60]}, which PyTorch's "
                    "executor does not know",
                    where=self.name,
                    fix="build the bundle again, or for --executor cpu",
                )
            body = None
            if bodies:
                names = [
                    tuple(v.name for v in side) for side in (bodies[0].input, bodies[0].output)
                ]
                body = Body(self._parse(bodies[0].node), *names)
                del attributes["body"]
            place = tuple(proto.input), tuple(proto.output)
            nodes.append(Node(proto.op_type, proto.domain, proto.name, *place, attributes, body))
        return nodes

    def _fold(self, nodes: list[Node], constants: dict[str, Constant]) -> list[Node]:
        """The nodes but those of constants alone, which become constants."""
        left = []
        for node in nodes:
            names = [name for name in node.inputs if name]
            if (
                node.body is not None
                or node.operation in self._kernels
                or not all(name in constants for name in names)
            ):
                left.append(node)
                continue
            own = [constants[name] if name else None for name in node.inputs]
            keys = [one and one[0] for one in own]
            told = (node.operation, sorted(node.attributes.items(), key=str), keys)
            key = hashlib.sha256(repr(told).encode()).hexdigest()

            def make(at: int, node: Node = node, own: list[Constant | None] = own) -> Tensor:
                values = {name: one[1]() for name, one in zip(node.inputs, own, strict=True) if one}
                return self._results(node, values, Kept())[at]

            for at, name in enumerate(node.outputs):
                constants[name] = f"{key}:{at}", lambda at=at, make=make: make(at)
        return left

    def _find_statics(self) -> set[str]:
        """Marks the nodes whose results follow from the inputs' shapes; every value of theirs."""
        static, ragged = set(self._constants), set[str]()  # ragged: shapes that data decide
        for node in self.nodes:
            names = [name for name in node.inputs if name]
            is_plain = node.body is None and node.operation not in self._kernels
            read = OPERATIONS[node.operation].host if is_plain else ()
            if (
                node.operation in _RAGGED
                or not ragged.isdisjoint(_read_by(node))
                or any(node.inputs[at] not in static for at in read if at < len(node.inputs))
            ):
                ragged.update(node.outputs)
            elif is_plain and (node.operation in _SHAPES or static.issuperset(names)):
                node.is_static = True
                static.update(node.outputs)
        return static

    def _plan_drops(self, static: Collection[str]) -> None:
        """Says after which node each value is read no more: activations take no memory then."""
        seen = {*static, *self.inputs, *self.outputs, *self._constants}
        for node in reversed(self.nodes):
            last = dict.fromkeys([*_read_by(node), *filter(None, node.outputs)])
            node.drops = tuple(name for name in last if name not in seen)
            seen.update(node.drops)


def _inlined(
    model: onnx.ModelProto, kernels: Collection[str], where: str
) -> Iterable[onnx.NodeProto]:
    """Nodes with bodies in place of calls, but those of native attention and of `kernels`."""
    kept = [(one.domain, one.name) for one in model.functions if one.name in kernels]
    light = onnx.ModelProto()
    light.CopyFrom(model)
    del light.graph.initializer[:]
    try:
        return inliner.inline_selected_functions(
            light, [KEPT_WHOLE, *kept], exclude=True
        ).graph.node
    except Exception as error:  # the inliner's own classes
        raise DflashError(f"cannot be written out: {one_line(error)}", where=where) from error


def _read_by(node: Node) -> list[str]:
    """Every value that a node reads, its body's outer ones included."""
    names = [name for name in node.inputs if name]
    if node.body is not None:
        own = {*node.body.inputs, *(out for one in node.body.nodes for out in one.outputs)}
        inner = [name for one in node.body.nodes for name in _read_by(one)]
        names += [name for name in (*inner, *node.body.outputs) if name not in own]
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

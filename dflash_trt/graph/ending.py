"""Graphs of bundles are programs: those that need not end are refused before anything opens one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from dflash_trt.errors import DflashError

MAX_NODES = 1 << 20
"""With every function written out; the largest that is built has some ten thousand."""

_ONNX = ("", "ai.onnx")
_Key = tuple[str, str, str]


def check_ending(model: onnx.ModelProto, where: str | Path) -> None:
    """Refuses a graph whose work no tensor in it bounds.

    Of what repeats, graphs that are built here have one kind: a loop with a turn for each element
    of a tensor, and no loop inside it. A function that calls itself, and functions that call each
    other twice over forty steps, are refused for the same reason.

    Raises:
        DflashError: another loop, another operation that holds a graph, or too many nodes.
    """
    functions = {(one.domain, one.name, one.overload): one for one in model.functions}
    walk = _Walk(functions, where)
    if any(domain in _ONNX for domain, _, _ in functions):
        raise walk.refusal("a function by the name of an operation")
    walk.count(model.graph.node, is_inside=False)


@dataclass(frozen=True, slots=True)
class _Walk:
    functions: dict[_Key, onnx.FunctionProto]
    where: str | Path
    counted: dict[tuple[_Key, bool], int | None] = field(default_factory=dict)
    """Nodes of a function, by whether a loop calls it; None while they are counted."""

    def count(self, nodes: Sequence[onnx.NodeProto], *, is_inside: bool) -> int:
        """Nodes with all functions written out; `is_inside`: they are repeated by a loop."""
        total = 0
        for node in nodes:
            total += 1
            key = (node.domain, node.op_type, node.overload)
            if key in self.functions:
                total += self._count_function(key, is_inside=is_inside)
            elif node.domain in _ONNX and node.op_type == "Loop":
                if is_inside or not _is_bounded(node, nodes):
                    raise self.refusal("a loop that no tensor bounds")
                (body,) = (one.g for one in node.attribute if one.name == "body")
                total += self.count(body.node, is_inside=True)
            elif any(one.HasField("g") or one.graphs for one in node.attribute):
                raise self.refusal("a graph inside an operation that is no loop")
            if total > MAX_NODES:
                raise self.refusal(f"more than {MAX_NODES:,} nodes")
        return total

    def _count_function(self, key: _Key, *, is_inside: bool) -> int:
        known = self.counted.get((key, is_inside), -1)
        if known is None:
            raise self.refusal("a function that calls itself")
        if known < 0:
            self.counted[key, is_inside] = None
            known = self.count(self.functions[key].node, is_inside=is_inside)
            self.counted[key, is_inside] = known
        return known

    def refusal(self, what: str) -> DflashError:
        return DflashError(f"has {what}", where=self.where, fix="build the bundle again")


def _is_bounded(loop: onnx.NodeProto, beside: Sequence[onnx.NodeProto]) -> bool:
    """Whether it has a body, and a turn for each element of a tensor at most."""
    if [one.name for one in loop.attribute] != ["body"]:
        return False
    return any(
        node.op_type == "Size" and node.domain in _ONNX and loop.input[0] in node.output
        for node in beside
        if loop.input and loop.input[0]
    )

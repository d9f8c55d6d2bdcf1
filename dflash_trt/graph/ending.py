"""Whether the work of a graph ends: a bundle's graph is a program, and anybody may write one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from dflash_trt.errors import DflashError

MAX_NODES = 1 << 20
"""With every function written out; the largest graph that is built has some ten thousand."""


def check_ending(model: onnx.ModelProto, where: Path) -> None:
    """Refuses a graph whose work no tensor in it bounds: a bundle's graph is a program.

    Graphs that are built here have loops with a turn for each element of a tensor, and no loop
    inside them.

    Raises:
        DflashError: another loop, another operation that holds a graph, or too many nodes.
    """
    functions = {(one.domain, one.name, one.overload): one.node for one in model.functions}
    counted: dict[object, int] = {}

    def count(nodes: Sequence[onnx.NodeProto], *, in_loop: bool) -> int:
        """Nodes with all functions written out."""
        total = len(nodes)
        sizes = {one for node in nodes if node.op_type == "Size" for one in node.output}
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            bodies = [one.g.node for one in node.attribute if one.HasField("g")]
            if key in functions:
                if (key, in_loop) not in counted:
                    counted[key, in_loop] = MAX_NODES  # of one that calls itself
                    counted[key, in_loop] = count(functions[key], in_loop=in_loop)
                total += counted[key, in_loop]
            elif key == ("", "Loop", "") and not in_loop and sizes.intersection(node.input[:1]):
                total += count(bodies[0], in_loop=True)
            elif key == ("", "Scan", "") and not in_loop and len(bodies) == 1:
                total += count(bodies[0], in_loop=True)  # a turn for each of a tensor's items
            elif bodies or any(one.graphs for one in node.attribute):
                raise refusal("a loop that no tensor bounds")
            if total > MAX_NODES:
                raise refusal(f"more than {MAX_NODES:,} nodes")
        return total

    def refusal(what: str) -> DflashError:
        return DflashError(f"has {what}", where=where, fix="build the bundle again")

    if any("Size" in key or key[0] in ("", "ai.onnx") for key in functions):
        raise refusal("a function by the name of an operation")
    count(model.graph.node, in_loop=False)

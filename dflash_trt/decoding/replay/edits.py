"""Edits: how replayed graphs differ from those of the bundle, in memory only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from pathlib import Path

import onnx

from dflash_trt.core.files import FileKind, find_file
from dflash_trt.errors import DflashError
from dflash_trt.graph.dflash2.selector import IDS, MASKS, PLACE, SCORES, START
from dflash_trt.graph.draft import MARKOV_CHOICE
from dflash_trt.graph.eagle import STEPS

GraphEdit = Callable[[onnx.ModelProto], None]
"""Changes a graph in place."""


@dataclass(frozen=True, slots=True)
class Edits:
    """What is changed before the graphs are opened; nothing by default."""

    target: tuple[GraphEdit, ...] = ()
    draft: tuple[GraphEdit, ...] = ()


def load_graph(path: Path) -> onnx.ModelProto:
    """A graph of a bundle, without its weights.

    Raises:
        DflashError: unreadable.
    """
    file = find_file(path, FileKind.GRAPH)
    try:
        return onnx.load(file, load_external_data=False)
    except Exception as error:
        raise DflashError("is not a readable graph", where=path) from error


def find_node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    """The node called `name`.

    Raises:
        DflashError: the graph has none, for another version built it.
    """
    for node in model.graph.node:
        if node.name == name:
            found: onnx.NodeProto = node
            return found
    where, fix = f"{model.graph.name}.onnx", "build the bundle again"
    raise DflashError(f"has no node {name}", where=where, fix=fix)


def has_node(model: onnx.ModelProto, name: str) -> bool:
    """Whether there is a node called `name`."""
    return any(node.name == name for node in model.graph.node)


def tapped_features(model: onnx.ModelProto) -> str:
    """The value [T,taps·H] of `target.onnx` that the draft's `fc` reads, or an MTP layer keeps."""
    if has_node(model, "injection/taps"):
        return "injection/taps"
    has_fc = has_node(model, "injection/fc")
    return _first_input(model, "injection/fc" if has_fc else "injection/feature_rows")


def add_streams(model: onnx.ModelProto, layers: int) -> str:
    """Adds a value [T,(taps + 1)·H] to `target.onnx`: the tapped features, and behind them the
    residual stream after the last of its `layers`, which its norm and head read."""
    parts = [tapped_features(model), residual_after(model, layers - 1, layers)]
    node = onnx.helper.make_node("Concat", parts, ["streams"], name="streams", axis=1)
    model.graph.node.append(node)
    return "streams"


def residual_after(model: onnx.ModelProto, layer: int, layers: int) -> str:
    """The target's residual stream [T,H] after decoder layer `layer` of `layers`.

    -1 is what enters the first layer, the embedded tokens.
    """
    reader = "head/picked" if layer == layers - 1 else f"layers.{layer + 1}/attention/norm"
    return _first_input(model, reader)


def draft_logits(model: onnx.ModelProto) -> str:
    """The value of `draft.onnx` whose argmax are the drafts: [B·(S-1),V]; of a Markov chain
    [B,n·V] with n at least S - 1, of an EAGLE-3 chain [S-1,B,V]. Those of chains are added. Of a
    walk [B,n,top_k,2] they are candidates, each with its score."""
    if has_node(model, STEPS):
        return _tell_steps(find_node(model, STEPS))
    if has_node(model, SCORES):
        return _tell_walk(model)
    if has_node(model, "head/choice"):
        return _first_input(model, "head/choice")
    slots = (f"head/{MARKOV_CHOICE.format(slot)}" for slot in count())
    names = takewhile(partial(has_node, model), slots)
    parts = [_first_input(model, name) for name in names]
    node = onnx.helper.make_node("Concat", parts, ["chain"], name="chain", axis=1)
    model.graph.node.append(node)
    return "chain"


def _tell_walk(model: onnx.ModelProto) -> str:
    """Adds all slots' candidates, with their scores behind what was chosen; the value's name."""
    slots = takewhile(partial(has_node, model), (PLACE.format(slot) for slot in count()))
    constant = partial(onnx.helper.make_tensor, data_type=onnx.TensorProto.INT64, dims=[1])
    numbers = {f"walk_{one}": constant(f"walk_{one}", vals=[one]) for one in (0, 1, 2, 3)}
    model.graph.initializer.extend(numbers.values())
    cut, float32 = ["walk_0", MASKS, "walk_1"], onnx.TensorProto.FLOAT
    for op, inputs, name, attributes in (
        ("Concat", [START, *slots], "walk_places", {"axis": 1}),
        ("Slice", ["walk_places", *cut], "walk_before", {}),
        ("Unsqueeze", ["walk_before", "walk_2"], "walk_rows", {}),
        ("GatherND", [SCORES, "walk_rows"], "walk_scores", {"batch_dims": 2}),
        ("Cast", [IDS], "walk_tokens", {"to": float32}),
        ("Unsqueeze", ["walk_tokens", "walk_3"], "walk_first", {}),
        ("Unsqueeze", ["walk_scores", "walk_3"], "walk_second", {}),
        ("Concat", ["walk_first", "walk_second"], "walk", {"axis": 3}),
    ):
        node = onnx.helper.make_node(op, inputs, [name], name=name, **attributes)
        model.graph.node.append(node)
    return "walk"


def _tell_steps(loop: onnx.NodeProto) -> str:
    """Lets the loop of an EAGLE-3 chain tell each step's logits; the value's name."""
    (body,) = (one.g for one in loop.attribute if one.name == "body")
    (logits,) = (one.input[0] for one in body.node if one.name == f"{STEPS}/choice")
    kind = onnx.TensorProto.FLOAT
    body.output.append(onnx.helper.make_tensor_value_info(logits, kind, None))
    loop.output.append("step_logits")
    return "step_logits"


def add_output(model: onnx.ModelProto, value: str) -> None:
    """Makes an inner float32 value an output."""
    if all(one.name != value for one in model.graph.output):
        kind = onnx.TensorProto.FLOAT
        model.graph.output.append(onnx.helper.make_tensor_value_info(value, kind, None))


def _first_input(model: onnx.ModelProto, name: str) -> str:
    return str(find_node(model, name).input[0])

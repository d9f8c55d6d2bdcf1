"""The table of a graph's inputs and outputs, which its builder declares and its executor binds.

A symbolic axis has a letter of the legend in bindings.py. Outputs that observe are not in the
table: they follow from the graph's nodes (see GraphBuilder.observe).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from dflash_trt.graph.bindings import (
    ACCEPTED,
    BLOCK_IDS,
    CACHE_START,
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    CANDIDATES,
    CHOICE_IDS,
    DRAFT_TOKEN_IDS,
    KV,
    LOGIT_ROWS,
    LOGITS,
    NEW_START,
    NEW_TOKENS,
    NEXT_BLOCK_IDS,
    ROWS_END,
    ROWS_SIDE,
    SAMPLING,
    STATE_START,
    TOKEN_IDS,
    CacheKind,
    Dim,
    GraphName,
    Owner,
    cache_input,
    cache_output,
    page_table_input,
)
from dflash_trt.graph.caches import cache_head_dim, cache_strategy
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.gated_delta import is_stepped_by_kernel, kept_rows
from dflash_trt.graph.model import GraphBuilder
from dflash_trt.hardware.kernels import SIDES
from dflash_trt.models.sizes import DecoderSizes, LayerSizes

OWNERS: dict[GraphName, tuple[Owner, ...]] = {
    "target": ("target", "draft"),
    "draft": ("draft",),
    "target_only": ("target",),
}
"""Whose caches each graph has, in the order of its inputs."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The fixed dimensions of one layer's K or V cache.

    `window` is the layer's where its pages have a page table of their own.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of a recurrent layer of the target, [heads, D, D] of a sequence, and its rows.

    `kept_rows` of `row_elements` each lie before the position that a sequence has reached. In
    engines there is an axis of `sides`: 2 of which a kernel reads one and writes the other, or 1,
    since TensorRT itself updates only what has K's four axes.
    """

    heads: int
    head_dim: int
    kept_rows: int
    row_elements: int
    sides: int | None = None

    @property
    def sizes(self) -> dict[CacheKind, tuple[int, ...]]:
        """Of one sequence, by kind."""
        own = () if self.sides is None else (self.sides,)
        return {
            "state": (self.heads, self.head_dim, self.head_dim),
            "rows": (*own, self.kept_rows, self.row_elements),
        }


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The caches of a target and its draft, a shape for each layer."""

    target: tuple[CacheShape | StateShape, ...]
    draft: tuple[CacheShape | StateShape, ...] = ()

    def of(self, graph: GraphName) -> dict[str, CacheShape]:
        """The shape of each K and V cache of a graph by its input's name, in the graph's order."""
        layers = {"target": self.target, "draft": self.draft}
        return {
            cache_input(owner, kv, layer): shape
            for owner in OWNERS[graph]
            for layer, shape in enumerate(layers[owner])
            if isinstance(shape, CacheShape)
            for kv in KV
        }

    def states(self, graph: GraphName = "target") -> dict[str, tuple[int, ...]]:
        """What a sequence has in a graph's recurrent layers, by input name, in its order."""
        return {
            cache_input("target", kind, layer): sizes
            for layer, shape in enumerate(self.target if graph != "draft" else ())
            if isinstance(shape, StateShape)
            for kind, sizes in shape.sizes.items()
        }

    @property
    def has_sides(self) -> bool:
        """Whether recurrent layers have their rows twice, as a kernel of ours wants them."""
        found = (one.sides for one in self.target if isinstance(one, StateShape))
        return SIDES in found

    def shapes(self) -> dict[str, CacheShape]:
        """The shape of every K and V cache, by its input's name."""
        return self.of("target")


def cache_layout(
    form: GraphForm, target: DecoderSizes, draft: DecoderSizes | None = None
) -> CacheLayout:
    """The caches of a pair's graphs in `form`, or of a target alone."""
    return CacheLayout(_shapes(target, form), () if draft is None else _shapes(draft, form))


def _shapes(sizes: DecoderSizes, form: GraphForm) -> tuple[CacheShape | StateShape, ...]:
    shapes = [_shape(layer, form, has_room=sizes.needs_sink_room) for layer in sizes.layers]
    if sizes.features:  # one half beside the other, as if they were K and V of one more layer
        shapes.append(CacheShape(1, sizes.features // 2))
    return tuple(shapes)


def _shape(layer: LayerSizes, form: GraphForm, *, has_room: bool) -> CacheShape | StateShape:
    one = layer.recurrent
    if one is None:
        head_dim = cache_head_dim(layer.head_dim, has_room, form)
        window = layer.window if layer.window in form.windows else None
        return CacheShape(layer.kv_heads, head_dim, window)
    kept = kept_rows(form, one)
    sides = (SIDES if is_stepped_by_kernel(form, one) else 1) if form.is_native else None
    return StateShape(one.value_heads, one.head_dim, kept, one.row_elements, sides)


_NamedTensor = tuple[str, int, tuple[Dim, ...]]


class Role(Enum):
    """What a tensor is to a caller. A cache is an input that its output updates in place."""

    INPUT = "input"
    OUTPUT = "output"
    CACHE = "cache"
    UPDATED_CACHE = "updated cache"


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """One input or output; `element_type` is ONNX's.

    `updates` names the cache in whose memory an updated cache lies.
    """

    name: str
    element_type: int
    shape: tuple[Dim, ...]
    role: Role
    updates: str | None = None

    @property
    def is_input(self) -> bool:
        return self.role in (Role.INPUT, Role.CACHE)

    @property
    def dtype(self) -> np.dtype[Any]:
        return helper.tensor_dtype_to_np_dtype(self.element_type)

    def sized(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with `axes` for its letters; -1 for those that `axes` does not have."""
        return tuple(axes.get(size, -1) if isinstance(size, str) else size for size in self.shape)


@functools.cache
def graph_tensors(
    graph: GraphName,
    form: GraphForm,
    layout: CacheLayout,
    vocab_size: int,
    *,
    has_candidates: bool | None = None,
) -> tuple[GraphTensor, ...]:
    """Every input of `graph` in its order, then every output in its.

    `layout` has the shapes of caches as stored. `form` says whether a target tells candidates,
    unless `has_candidates` does.
    """
    if has_candidates is None:
        has_candidates = form.has_candidates
    int64, batch, rows = TensorProto.INT64, ("B",), ("B", "R")
    ids = (BLOCK_IDS if graph == "draft" else TOKEN_IDS, int64, ("B", "S"))
    inputs: list[_NamedTensor] = [ids, (CACHE_START, int64, batch)]
    outputs: list[_NamedTensor]
    if graph == "draft":
        outputs = [(DRAFT_TOKEN_IDS, int64, ("B", "S"))]
    else:
        inputs.append((LOGIT_ROWS, int64, rows))
        outputs = [(CHOICE_IDS, int64, rows), (LOGITS, TensorProto.FLOAT, (*rows, vocab_size))]
        if form.draws:
            inputs.append((SAMPLING, int64, ("B", 4)))
        if form.draws and graph == "target":
            outputs.append((ACCEPTED, TensorProto.INT32, batch))
            outputs.append((NEW_TOKENS, int64, rows))
            outputs.append((NEW_START, int64, batch))
            outputs.append((NEXT_BLOCK_IDS, int64, rows))
        if has_candidates:
            kept = (*rows, min(CANDIDATES, vocab_size))
            outputs.append((CANDIDATE_IDS, int64, kept))
            outputs.append((CANDIDATE_LOGITS, TensorProto.FLOAT, kept))
    if form.is_paged:
        found = {one.window for one in layout.of(graph).values()}
        for window in (None, *(window for window in form.windows if window in found)):
            table = page_table_input(window)
            inputs.append((table, TensorProto.INT32, ("B", form.columns or "C")))
    states = layout.states(graph)
    if states:
        inputs += [(name, int64, batch) for name in (STATE_START, ROWS_END)]
        inputs += [(ROWS_SIDE, int64, batch)] * layout.has_sides
    given = [GraphTensor(*one, Role.INPUT) for one in inputs]
    made = [GraphTensor(*one, Role.OUTPUT) for one in outputs]
    strategy = cache_strategy(form)
    for name, cache in layout.of(graph).items():
        shape = strategy.shape(cache.kv_heads, cache.head_dim, cache.window)
        given.append(GraphTensor(name, form.cache_type, shape, Role.CACHE))
        updated = cache_output(name)
        made.append(GraphTensor(updated, form.cache_type, shape, Role.UPDATED_CACHE, name))
    for name, sizes in states.items():
        held: tuple[Dim, ...] = ("B", *sizes)
        given.append(GraphTensor(name, TensorProto.FLOAT, held, Role.CACHE))
        updated = cache_output(name)
        made.append(GraphTensor(updated, TensorProto.FLOAT, held, Role.UPDATED_CACHE, name))
    return (*given, *made)


def declare(b: GraphBuilder, tensors: Iterable[GraphTensor]) -> None:
    """Adds inputs and outputs to a graph, each kind in the order given."""
    for tensor in tensors:
        add = b.input if tensor.is_input else b.output
        add(tensor.name, tensor.element_type, tensor.shape)

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

from dflash_trt.graph import bindings as io
from dflash_trt.graph.bindings import Dim, GraphName, Owner
from dflash_trt.graph.caches import cache_head_dim, cache_shape
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.gated_delta import is_stepped_by_kernel, kept_rows
from dflash_trt.graph.model import GraphBuilder
from dflash_trt.hardware.kernels import SIDES
from dflash_trt.models.sizes import DecoderSizes

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
    """What a recurrent layer of the target holds of a sequence, float32.

    The state is [heads, D, D], and the rows before the position that it has reached [L, elements].
    In engines rows have an axis more: 2 sides of which a kernel reads one and writes the other, or
    1, since TensorRT itself updates only what has K's four axes.
    """

    state: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The caches of a target and its draft, a shape for each layer."""

    target: tuple[CacheShape | StateShape, ...]
    draft: tuple[CacheShape | StateShape, ...] = ()

    def of(self, graph: GraphName = "target") -> dict[str, CacheShape]:
        """The shape of each K and V cache of a graph by its input's name, in the graph's order."""
        layers = {"target": self.target, "draft": self.draft}
        return {
            io.cache_input(owner, kv, layer): shape
            for owner in OWNERS[graph]
            for layer, shape in enumerate(layers[owner])
            if isinstance(shape, CacheShape)
            for kv in io.KV
        }

    def states(self, graph: GraphName = "target") -> dict[str, tuple[int, ...]]:
        """What a sequence has in a graph's recurrent layers, by input name, in its order."""
        return {
            io.cache_input("target", kind, layer): sizes
            for layer, shape in enumerate(self.target if graph != "draft" else ())
            if isinstance(shape, StateShape)
            for kind, sizes in zip(io.RECURRENT, (shape.state, shape.rows), strict=True)
        }

    @property
    def has_sides(self) -> bool:
        """Whether recurrent layers have their rows twice, as a kernel of ours wants them."""
        return any(isinstance(one, StateShape) and one.rows[:-2] == (SIDES,) for one in self.target)


def cache_layout(
    form: GraphForm, target: DecoderSizes, draft: DecoderSizes | None = None
) -> CacheLayout:
    """The caches of a pair's graphs in `form`, or of a target alone."""
    return CacheLayout(_shapes(target, form), () if draft is None else _shapes(draft, form))


def _shapes(sizes: DecoderSizes, form: GraphForm) -> tuple[CacheShape | StateShape, ...]:
    shapes: list[CacheShape | StateShape] = []
    for layer in sizes.layers:
        if (one := layer.recurrent) is None:
            head_dim = cache_head_dim(layer.head_dim, sizes.needs_sink_room, form)
            window = layer.window if layer.window in form.windows else None
            shapes.append(CacheShape(layer.kv_heads, head_dim, window))
            continue
        sides = (SIDES if is_stepped_by_kernel(form, one) else 1,) if form.is_native else ()
        rows = (*sides, kept_rows(form, one), one.row_elements)
        shapes.append(StateShape((one.value_heads, one.head_dim, one.head_dim), rows))
    if sizes.features:  # one half beside the other, as if they were K and V of one more layer
        shapes.append(CacheShape(1, sizes.features // 2))
    return tuple(shapes)


_Named = tuple[str, int, tuple[Dim, ...]]


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
    int64, int32, batch, rows = TensorProto.INT64, TensorProto.INT32, ("B",), ("B", "R")
    ids = io.BLOCK_IDS if graph == "draft" else io.TOKEN_IDS
    given: list[_Named] = [(ids, int64, ("B", "S")), (io.CACHE_START, int64, batch)]
    made: list[_Named] = []
    if graph == "draft":
        made.append((io.DRAFT_TOKEN_IDS, int64, ("B", "S")))
    else:
        given.append((io.LOGIT_ROWS, int64, rows))
        made.append((io.CHOICE_IDS, int64, rows))
        made.append((io.LOGITS, TensorProto.FLOAT, (*rows, vocab_size)))
        if form.draws:
            given.append((io.SAMPLING, int64, ("B", 4)))
        if form.draws and graph == "target":
            made += [(io.ACCEPTED, int32, batch), (io.NEW_TOKENS, int64, rows)]
            made += [(io.NEW_START, int64, batch), (io.NEXT_BLOCK_IDS, int64, rows)]
        if has_candidates:
            kept = (*rows, min(io.CANDIDATES, vocab_size))
            made.append((io.CANDIDATE_IDS, int64, kept))
            made.append((io.CANDIDATE_LOGITS, TensorProto.FLOAT, kept))
    caches, states = layout.of(graph), layout.states(graph)
    if form.is_paged:
        found = {one.window for one in caches.values()}
        for window in (None, *(window for window in form.windows if window in found)):
            given.append((io.page_table_input(window), int32, ("B", form.columns or "C")))
    if states:
        given += [(name, int64, batch) for name in (io.STATE_START, io.ROWS_END)]
        given += [(io.ROWS_SIDE, int64, batch)] * layout.has_sides
    held: list[_Named] = [
        (name, form.cache_type, cache_shape(form, one.kv_heads, one.head_dim, one.window))
        for name, one in caches.items()
    ]
    held += [(name, TensorProto.FLOAT, ("B", *sizes)) for name, sizes in states.items()]
    return (
        *(GraphTensor(*one, Role.INPUT) for one in given),
        *(GraphTensor(*one, Role.CACHE) for one in held),
        *(GraphTensor(*one, Role.OUTPUT) for one in made),
        *(
            GraphTensor(io.cache_output(name), kind, shape, Role.UPDATED_CACHE, name)
            for name, kind, shape in held
        ),
    )


def declare(b: GraphBuilder, tensors: Iterable[GraphTensor]) -> None:
    """Adds inputs and outputs to a graph, each kind in the order given."""
    for tensor in tensors:
        add = b.input if tensor.is_input else b.output
        add(tensor.name, tensor.element_type, tensor.shape)

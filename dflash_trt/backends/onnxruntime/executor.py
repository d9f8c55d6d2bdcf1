"""The embedded default: the bundle's graphs on ONNX Runtime's CPU provider.

Every array that a call touches is bound by address once per shape: caches as input and output at
the same address, so that updates happen in place, and the draft's token ids as the target's input.
A step is then two `run` calls and a handful of integers written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from dflash_trt.backends.base import (
    ExecutorLimits,
    Int64Array,
    Scores,
    SpeculationOutput,
    StepCall,
    TargetCall,
    TargetGraph,
    TargetOutput,
)
from dflash_trt.backends.onnxruntime.caches import LinearCaches, PagedCaches, RecurrentStates
from dflash_trt.backends.onnxruntime.session import bind_array, check_session, open_session
from dflash_trt.errors import DflashError, one_line
from dflash_trt.graph import bindings as io
from dflash_trt.graph.bindings import GraphName
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.tensors import CacheLayout, GraphTensor, Role, graph_tensors

# Bindings are small, but a server with ragged prompts meets many shapes.
MAX_BINDINGS = 64


@dataclass(frozen=True, slots=True)
class _BoundCall:
    """A call bound for one shape: its graphs in order, and the arrays that they read and write.

    What no call of the shape changes is written already.
    """

    passes: list[tuple[GraphName, ort.InferenceSession, ort.IOBinding]]
    arrays: dict[str, npt.NDArray[Any]]


class OnnxRuntimeExecutor:
    """Executor over `{target,draft,target_only}.onnx` in one folder.

    Args:
        folder: the bundle's folder; external data resolves relative to it.
        limits: what the bundle allows.
        layout: cache dimensions of the pair.
        threads: intra-op threads; None leaves the choice to ONNX Runtime.

    `caches` holds what has been written, `states` that of recurrent layers.
    """

    is_bitwise = True

    def __init__(
        self,
        folder: Path,
        limits: ExecutorLimits,
        layout: CacheLayout,
        *,
        threads: int | None = None,
    ) -> None:
        self._folder = folder
        self.limits = limits
        self._threads = threads
        self._sessions: dict[GraphName, ort.InferenceSession] = {}
        self._layout = layout
        shapes = layout.of()
        slots, copies, replay = limits.max_batch, limits.state_copies, limits.block_size
        self.caches: LinearCaches | PagedCaches
        if limits.page_pool is None:
            self.caches = LinearCaches(shapes, slots, limits.max_seq_len)
        else:
            self.caches = PagedCaches(shapes, slots, limits.page_pool)
        self.states = RecurrentStates(layout.states(), slots, copies, replay)
        self._held = [0] * slots
        self._bindings: OrderedDict[tuple[object, ...], _BoundCall] = OrderedDict()
        self._closed = False

    def warm_up(self, rows: Mapping[int, int], plain: TargetGraph) -> None:
        """Nothing: a call of a new shape costs as much as any other."""

    def forward(self, call: TargetCall) -> TargetOutput:
        bound = self._enter((call.graph,), call, call.logit_rows.shape[1])
        arrays = bound.arrays
        arrays[io.TOKEN_IDS][...] = call.token_ids
        arrays[io.LOGIT_ROWS][...] = call.logit_rows
        self._run(bound, call)
        return TargetOutput(arrays[io.CHOICE_IDS], arrays.get(io.LOGITS))

    def speculate(self, call: StepCall) -> SpeculationOutput:
        bound = self._enter(("draft", "target"), call, call.rows)
        arrays = bound.arrays
        arrays[io.BLOCK_IDS][:, 0] = call.anchors
        self._run(bound, call, call.revise)
        return SpeculationOutput(arrays[io.TOKEN_IDS], arrays[io.CHOICE_IDS], arrays.get(io.LOGITS))

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self.caches.move(source, destination, length)
        self.states.move(source, destination)
        self._held[destination] = length

    def bind_pages(self, slot: int, page_ids: Sequence[int], window: int | None = None) -> None:
        if not isinstance(self.caches, PagedCaches):
            raise ValueError("linear caches have no pages")
        self.caches.bind(slot, page_ids, window)

    def release_slots(self, first_free: int) -> None:
        for slot in range(first_free, len(self._held)):
            if self._held[slot]:
                self._held[slot] = 0
                self.caches.clear(slot)
                self.states.clear(slot)

    def close(self) -> None:
        self._closed = True
        self._bindings.clear()
        self._sessions.clear()
        self.caches = LinearCaches({}, 0, 0)
        self.states = RecurrentStates({}, 0, 0, 0)

    def _hold(self, ends: Mapping[int, int], rows: int) -> int:
        """Lets the caches follow `rows` rows that end at `ends`, by slot; forgets moved addresses.

        Returns the columns of the call's page table, 0 where the caches have none.

        Raises:
            ValueError: a slot's pages end before its rows do; nothing has been touched.
        """
        columns = 0 if isinstance(self.caches, LinearCaches) else self.caches.enter(ends, rows)
        for slot, end in ends.items():
            # Rows may be run again behind others that are still needed.
            self._held[slot] = max(self._held[slot], end)
        if isinstance(self.caches, LinearCaches) and self.caches.fit(self._held):
            self._bindings.clear()
        return columns

    def preload(self, graphs: Iterable[GraphName]) -> None:
        """Opens sessions ahead of the first request, whose time they would count towards."""
        for graph in graphs:
            self._session(graph)

    def _enter(
        self, graphs: tuple[GraphName, ...], call: TargetCall | StepCall, picked: int
    ) -> _BoundCall:
        """The arrays of `call`, of which the caller writes token ids; caches follow its rows.

        Raises:
            ValueError: the call is outside the limits; nothing has been touched.
        """
        if self._closed:
            raise ValueError("the executor is closed")
        ends = self.limits.check(call)
        if self.states:
            self.states.begin(call.slots, call.starts)
        columns, has_scores = self._hold(ends, call.rows), call.scores is not Scores.NONE
        key = (graphs, call.first_slot, call.batch, call.rows, picked, columns, has_scores)
        bound = self._bindings.get(key)
        if bound is None:
            bound = self._bindings[key] = self._bind(graphs, call, picked, columns)
            if len(self._bindings) > MAX_BINDINGS:
                self._bindings.popitem(last=False)
        else:
            self._bindings.move_to_end(key)
        bound.arrays[io.CACHE_START][...] = call.starts
        if isinstance(self.caches, PagedCaches):
            # Behind its end a sequence may have pages whose earlier owner left NaN.
            for window in (None, *self.limits.windows):
                if (table := bound.arrays.get(io.page_table_input(window))) is not None:
                    self.caches.of(window).fill(table, list(ends), ends)
        if self.states:
            bound.arrays[io.STATE_START][...] = self.states.state_start[call.slots]
            bound.arrays[io.ROWS_END][...] = self.states.rows_end[call.slots]
        return bound

    def _run(
        self,
        bound: _BoundCall,
        call: TargetCall | StepCall,
        revise: Callable[[Int64Array], None] | None = None,
    ) -> None:
        """Runs the graphs of `bound`; the drafts of a step may be revised before the target."""
        if self.states:
            self.states.lose(call.slots)
        for graph, session, binding in bound.passes:
            try:
                session.run_with_iobinding(binding)
            except Exception as error:
                raise DflashError(one_line(error), where=f"{graph}.onnx") from error
            if revise is not None and graph == "draft":
                revise(bound.arrays[io.DRAFT_TOKEN_IDS])
        if self.states:
            self.states.end(call.slots, call.starts, call.rows)

    def _bind(
        self,
        graphs: tuple[GraphName, ...],
        call: TargetCall | StepCall,
        picked: int,
        columns: int,
    ) -> _BoundCall:
        axes = {"B": call.batch, "S": call.rows, "R": picked, "C": columns}
        ids = np.empty((call.batch, call.rows), np.int64)
        bound = _BoundCall([], {io.DRAFT_TOKEN_IDS: ids, io.TOKEN_IDS: ids})
        places: dict[str, tuple[list[int], int]] = {}
        for graph in graphs:
            session = self._session(graph)
            binding = session.io_binding()
            for one in self._tensors(graph):
                bind = binding.bind_input if one.is_input else binding.bind_output
                if one.role in (Role.CACHE, Role.UPDATED_CACHE):
                    cache = one.updates or one.name
                    if cache not in places:
                        held = self.states if cache in self.states else self.caches
                        shape = held.shape(cache, call.batch)
                        places[cache] = shape, held.address(cache, call.first_slot)
                    bind(one.name, "cpu", 0, np.float32, *places[cache])
                elif one.name != io.LOGITS or call.scores is not Scores.NONE:
                    array = bound.arrays.setdefault(one.name, np.empty(one.sized(axes), one.dtype))
                    bind_array(bind, one.name, array)
            bound.passes.append((graph, session, binding))
        if isinstance(call, StepCall):
            bound.arrays[io.BLOCK_IDS][...] = call.block_ids(self.limits.mask_token_id)
            bound.arrays[io.LOGIT_ROWS][...] = np.arange(call.rows)
        return bound

    def _tensors(self, graph: GraphName) -> tuple[GraphTensor, ...]:
        pool, windows = self.limits.page_pool, self.limits.windows
        form = GraphForm(page_size=None if pool is None else pool.page_size, windows=windows)
        return graph_tensors(graph, form, self._layout, self.limits.vocab_size)

    def _session(self, graph: GraphName) -> ort.InferenceSession:
        """Opens a graph at its first use: plain generation never loads the draft."""
        if graph not in self._sessions:
            path = self._folder / f"{graph}.onnx"
            session = open_session(path, self._threads)
            check_session(session, path, self._tensors(graph))
            self._sessions[graph] = session
        return self._sessions[graph]

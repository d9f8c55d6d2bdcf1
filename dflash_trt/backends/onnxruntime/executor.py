"""The embedded default: the bundle's graphs on ONNX Runtime's CPU provider.

Every array a step touches is bound by address once per shape (a `_Binding`): caches as
input and output at the same address, so updates happen in place; the draft's token ids as
the target's input. A step is then two `run` calls and a handful of integers written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from dflash_trt.backends.onnxruntime.caches import LinearCaches
from dflash_trt.backends.onnxruntime.paged import PagedCaches
from dflash_trt.backends.onnxruntime.session import bind_array, check_session, open_session
from dflash_trt.backends.page_bindings import Int32Array
from dflash_trt.errors import DflashError, one_line
from dflash_trt.graph.bindings import (
    BLOCK_IDS,
    CACHE_START,
    CHOICE_IDS,
    DRAFT_TOKEN_IDS,
    LOGIT_ROWS,
    LOGITS,
    PAGE_TABLE,
    TOKEN_IDS,
    GraphName,
)
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.tensors import CacheLayout, graph_tensors

# Bindings are small, but a server with ragged prompts meets many shapes.
MAX_BINDINGS = 64


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the rows of a call go: `starts` [B], and in paged caches a `page_table` [B,C]."""

    starts: Int64Array
    page_table: Int32Array | None

    @classmethod
    def make(cls, batch: int, columns: int) -> _Places:
        """Arrays to fill before a call; no columns, no page table."""
        table = np.empty((batch, columns), np.int32) if columns else None
        return cls(np.empty(batch, np.int64), table)

    def bind(self, io: ort.IOBinding) -> None:
        bind_array(io.bind_input, CACHE_START, self.starts)
        if self.page_table is not None:
            bind_array(io.bind_input, PAGE_TABLE, self.page_table)


@dataclass(slots=True)
class _Binding:
    """One graph bound for one shape: the arrays to write before a run and to read after it."""

    io: ort.IOBinding
    ids: Int64Array
    places: _Places
    logit_rows: Int64Array | None
    choice_ids: Int64Array | None
    logits: npt.NDArray[np.float32] | None


@dataclass(slots=True)
class _Step:
    """A draft binding and the verify binding that reads its output."""

    draft: _Binding
    verify: _Binding


class OnnxRuntimeExecutor:
    """Executor over `{target,draft,target_only}.onnx` in one folder.

    Args:
        folder: the bundle's folder; external data resolves relative to it.
        limits: what the bundle allows.
        layout: cache dimensions of the pair.
        threads: intra-op threads; None leaves the choice to ONNX Runtime.
    """

    def __init__(
        self,
        folder: Path,
        limits: ExecutorLimits,
        layout: CacheLayout,
        *,
        threads: int | None = None,
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._threads = threads
        self._sessions: dict[GraphName, ort.InferenceSession] = {}
        self._layout = layout
        self._graph_caches = layout.graph_caches()
        shapes = layout.shapes()
        self._caches: LinearCaches | PagedCaches
        if limits.page_pool is None:
            self._caches = LinearCaches(shapes, limits.max_batch, limits.max_seq_len)
        else:
            self._caches = PagedCaches(shapes, limits.max_batch, limits.page_pool)
        self._held = [0] * limits.max_batch
        self._bindings: OrderedDict[tuple[object, ...], _Binding | _Step] = OrderedDict()
        self._generation = 0
        self._closed = False

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    @property
    def is_bitwise(self) -> bool:
        return True

    def forward(self, call: TargetCall) -> TargetOutput:
        columns = self._hold(call)
        want_logits = call.scores is not Scores.NONE
        batch, picked = call.logit_rows.shape
        key = (call.graph, call.first_slot, batch, call.rows, picked, columns, want_logits)
        binding = self._recall(key)
        if not isinstance(binding, _Binding):
            ids = np.empty((batch, call.rows), np.int64)
            places = _Places.make(batch, columns)
            binding = self._bind_target(
                call.graph, call.first_slot, ids, places, picked, want_logits
            )
            self._remember(key, binding)
        binding.ids[...] = call.token_ids
        self._fill(binding.places, call)
        assert binding.logit_rows is not None and binding.choice_ids is not None
        binding.logit_rows[...] = call.logit_rows
        self._run(call.graph, binding)
        return TargetOutput(binding.choice_ids, binding.logits)

    def speculate(self, call: StepCall) -> SpeculationOutput:
        columns = self._hold(call)
        want_logits = call.scores is not Scores.NONE
        key = ("speculate", call.first_slot, call.batch, call.rows, columns, want_logits)
        step = self._recall(key)
        if not isinstance(step, _Step):
            places = _Places.make(call.batch, columns)
            step = self._bind_step(call.first_slot, places, call.rows, want_logits)
            self._remember(key, step)
        step.draft.ids[:, 0] = call.anchors
        self._fill(step.draft.places, call)
        self._run("draft", step.draft)
        self._run("target", step.verify)
        assert step.verify.choice_ids is not None
        return SpeculationOutput(step.verify.ids, step.verify.choice_ids, step.verify.logits)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self._caches.move(source, destination, length)
        self._held[destination] = length

    def bind_pages(self, slot: int, page_ids: Sequence[int]) -> None:
        if not isinstance(self._caches, PagedCaches):
            raise ValueError("linear caches have no pages")
        self._caches.bind_pages(slot, page_ids)

    def release_slots(self, first_free: int) -> None:
        for slot in range(first_free, len(self._held)):
            if self._held[slot]:
                self._held[slot] = 0
                self._caches.clear(slot)

    def close(self) -> None:
        self._closed = True
        self._bindings.clear()
        self._sessions.clear()
        self._caches = LinearCaches({}, 0, 0)

    def _hold(self, call: TargetCall | StepCall) -> int:
        """Lets the caches follow what `call` writes; forgets addresses that moved.

        Returns the columns of the call's page table, 0 where the caches have none.

        Raises:
            ValueError: the call is outside the limits; nothing has been touched.
        """
        if self._closed:
            raise ValueError("the executor is closed")
        ends = self._limits.check(call)
        columns = 0
        if isinstance(self._caches, PagedCaches):
            columns = self._caches.enter(ends, call.rows)
        for slot, end in ends.items():
            # Rows may be run again behind others that are still needed.
            self._held[slot] = max(self._held[slot], end)
        if isinstance(self._caches, LinearCaches):
            self._caches.fit(self._held)
            if self._caches.generation != self._generation:
                self._generation = self._caches.generation
                self._bindings.clear()
        return columns

    def _fill(self, places: _Places, call: TargetCall | StepCall) -> None:
        places.starts[...] = call.starts
        if places.page_table is not None:
            assert isinstance(self._caches, PagedCaches)
            ends = (call.starts + call.rows).tolist()
            self._caches.fill(places.page_table, ends, call.first_slot)

    def preload(self, graphs: Iterable[GraphName]) -> None:
        """Opens sessions ahead of the first request, whose time they would count towards."""
        for graph in graphs:
            self._session(graph)

    def _bind_step(self, first_slot: int, places: _Places, rows: int, want_logits: bool) -> _Step:
        batch = len(places.starts)
        block_ids = np.full((batch, rows), self._limits.mask_token_id, np.int64)
        token_ids = np.empty((batch, rows), np.int64)
        io = self._session("draft").io_binding()
        bind_array(io.bind_input, BLOCK_IDS, block_ids)
        places.bind(io)
        bind_array(io.bind_output, DRAFT_TOKEN_IDS, token_ids)
        self._bind_caches(io, "draft", first_slot, batch)
        draft = _Binding(io, block_ids, places, None, None, None)
        verify = self._bind_target("target", first_slot, token_ids, places, rows, want_logits)
        assert verify.logit_rows is not None
        verify.logit_rows[...] = np.arange(rows)
        return _Step(draft, verify)

    def _bind_target(
        self,
        graph: TargetGraph,
        first_slot: int,
        ids: Int64Array,
        places: _Places,
        picked: int,
        want_logits: bool,
    ) -> _Binding:
        batch = len(ids)
        logit_rows = np.empty((batch, picked), np.int64)
        choice_ids = np.empty((batch, picked), np.int64)
        logits = None
        io = self._session(graph).io_binding()
        bind_array(io.bind_input, TOKEN_IDS, ids)
        places.bind(io)
        bind_array(io.bind_input, LOGIT_ROWS, logit_rows)
        bind_array(io.bind_output, CHOICE_IDS, choice_ids)
        if want_logits:
            logits = np.empty((batch, picked, self._limits.vocab_size), np.float32)
            bind_array(io.bind_output, LOGITS, logits)
        self._bind_caches(io, graph, first_slot, batch)
        return _Binding(io, ids, places, logit_rows, choice_ids, logits)

    def _bind_caches(
        self, io: ort.IOBinding, graph: GraphName, first_slot: int, batch: int
    ) -> None:
        for name, updated in self._graph_caches[graph]:
            shape = self._caches.shape(name, batch)
            address = self._caches.address(name, first_slot)
            io.bind_input(name, "cpu", 0, np.float32, shape, address)
            io.bind_output(updated, "cpu", 0, np.float32, shape, address)

    def _recall(self, key: tuple[object, ...]) -> _Binding | _Step | None:
        binding = self._bindings.get(key)
        if binding is not None:
            self._bindings.move_to_end(key)
        return binding

    def _remember(self, key: tuple[object, ...], binding: _Binding | _Step) -> None:
        self._bindings[key] = binding
        if len(self._bindings) > MAX_BINDINGS:
            self._bindings.popitem(last=False)

    def _run(self, graph: GraphName, binding: _Binding) -> None:
        try:
            self._session(graph).run_with_iobinding(binding.io)
        except Exception as error:
            raise DflashError(one_line(error), where=f"{graph}.onnx") from error

    def _session(self, graph: GraphName) -> ort.InferenceSession:
        """Opens a graph at its first use: plain generation never loads the draft."""
        if graph not in self._sessions:
            path = self._folder / f"{graph}.onnx"
            session = open_session(path, self._threads)
            pool = self._limits.page_pool
            form = GraphForm(page_size=None if pool is None else pool.page_size)
            vocab_size = self._limits.vocab_size
            check_session(session, path, graph_tensors(graph, form, self._layout, vocab_size))
            self._sessions[graph] = session
        return self._sessions[graph]

"""The embedded default: the bundle's graphs on ONNX Runtime's CPU provider.

Every array a step touches is bound by address once per shape (a `_Binding`): caches as
input and output at the same address, so updates happen in place; the draft's token ids as
the target's input. A step is then two `run` calls and a handful of integers written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from dflash_trt.errors import DflashError, one_line
from dflash_trt.executors.base import (
    ExecutorLimits,
    Int64Array,
    Scores,
    SpeculationOutput,
    TargetGraph,
    TargetOutput,
)
from dflash_trt.executors.caches import CacheLayout, LinearCaches
from dflash_trt.executors.session import bind_array, check_session, open_session
from dflash_trt.graph.bindings import (
    BLOCK_IDS,
    CACHE_START,
    CHOICE_IDS,
    DRAFT_TOKEN_IDS,
    LOGIT_ROWS,
    LOGITS,
    TOKEN_IDS,
    GraphName,
)

# Bindings are small, but a server with ragged prompts meets many shapes.
MAX_BINDINGS = 64


@dataclass(slots=True)
class _Binding:
    """One graph bound for one shape: the arrays to write before a run and to read after it."""

    io: ort.IOBinding
    ids: Int64Array
    starts: Int64Array
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
        self._graph_caches = layout.graph_caches()
        shapes = self._shapes = layout.shapes()
        self._caches = LinearCaches(shapes, limits.max_batch, limits.max_seq_len)
        self._held = [0] * limits.max_batch
        self._bindings: OrderedDict[tuple[object, ...], _Binding | _Step] = OrderedDict()
        self._generation = self._caches.generation
        self._closed = False

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    @property
    def is_bitwise(self) -> bool:
        return True

    def forward(
        self,
        graph: TargetGraph,
        first_slot: int,
        token_ids: Int64Array,
        starts: Int64Array,
        logit_rows: Int64Array,
        scores: Scores,
    ) -> TargetOutput:
        batch, rows = token_ids.shape
        if not 0 <= logit_rows.min() <= logit_rows.max() < rows:
            raise ValueError(f"logit rows {logit_rows.tolist()} are not within {rows} rows")
        self._hold(first_slot, starts, rows)
        want_logits = scores is not Scores.NONE  # whole rows serve as candidates too
        key = (graph, first_slot, batch, rows, logit_rows.shape[1], want_logits)
        binding = self._recall(key)
        if not isinstance(binding, _Binding):
            ids = np.empty((batch, rows), np.int64)
            binding = self._bind_target(
                graph, first_slot, ids, np.empty(batch, np.int64), logit_rows.shape[1], want_logits
            )
            self._remember(key, binding)
        binding.ids[...] = token_ids
        binding.starts[...] = starts
        assert binding.logit_rows is not None and binding.choice_ids is not None
        binding.logit_rows[...] = logit_rows
        self._run(graph, binding)
        return TargetOutput(binding.choice_ids, binding.logits)

    def speculate(
        self,
        first_slot: int,
        anchors: Int64Array,
        starts: Int64Array,
        block_size: int,
        scores: Scores,
    ) -> SpeculationOutput:
        batch = len(anchors)
        if not 2 <= block_size <= self._limits.block_size:
            raise ValueError(f"block size {block_size} is not 2 … {self._limits.block_size}")
        self._hold(first_slot, starts, block_size)
        want_logits = scores is not Scores.NONE
        key = ("speculate", first_slot, batch, block_size, want_logits)
        step = self._recall(key)
        if not isinstance(step, _Step):
            step = self._bind_step(first_slot, batch, block_size, want_logits)
            self._remember(key, step)
        step.draft.ids[:, 0] = anchors
        step.draft.starts[...] = starts
        self._run("draft", step.draft)
        self._run("target", step.verify)
        assert step.verify.choice_ids is not None
        return SpeculationOutput(step.verify.ids, step.verify.choice_ids, step.verify.logits)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self._caches.move(source, destination, length)
        self._held[destination] = length

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

    def _hold(self, first_slot: int, starts: Int64Array, rows: int) -> None:
        """Lets the caches follow what this call writes; forgets addresses that moved.

        Raises:
            ValueError: slots or positions outside the limits, before anything is touched: a
                write past a slot would land in the neighbour's.
        """
        if self._closed:
            raise ValueError("the executor is closed")
        slots = range(first_slot, first_slot + len(starts))
        ends = [start + rows for start in starts.tolist()]
        if first_slot < 0 or slots.stop > self._limits.max_batch:
            raise ValueError(f"slots {slots} are not within {self._limits.max_batch}")
        if min(ends) < rows or max(ends) > self._limits.max_seq_len:
            raise ValueError(f"rows end at {ends}, past {self._limits.max_seq_len} or before 0")
        for slot, end in zip(slots, ends, strict=True):
            self._held[slot] = end
        self._caches.fit(self._held)
        if self._caches.generation != self._generation:
            self._generation = self._caches.generation
            self._bindings.clear()

    def preload(self, graphs: Iterable[GraphName]) -> None:
        """Opens sessions ahead of the first request, whose time they would count towards."""
        for graph in graphs:
            self._session(graph)

    def _bind_step(self, first_slot: int, batch: int, rows: int, want_logits: bool) -> _Step:
        block_ids = np.full((batch, rows), self._limits.mask_token_id, np.int64)
        starts = np.empty(batch, np.int64)
        token_ids = np.empty((batch, rows), np.int64)
        io = self._session("draft").io_binding()
        bind_array(io.bind_input, BLOCK_IDS, block_ids)
        bind_array(io.bind_input, CACHE_START, starts)
        bind_array(io.bind_output, DRAFT_TOKEN_IDS, token_ids)
        self._bind_caches(io, "draft", first_slot, batch)
        draft = _Binding(io, block_ids, starts, None, None, None)
        verify = self._bind_target("target", first_slot, token_ids, starts, rows, want_logits)
        assert verify.logit_rows is not None
        verify.logit_rows[...] = np.arange(rows)
        return _Step(draft, verify)

    def _bind_target(
        self,
        graph: TargetGraph,
        first_slot: int,
        ids: Int64Array,
        starts: Int64Array,
        picked: int,
        want_logits: bool,
    ) -> _Binding:
        batch = len(ids)
        logit_rows = np.empty((batch, picked), np.int64)
        choice_ids = np.empty((batch, picked), np.int64)
        logits = None
        io = self._session(graph).io_binding()
        bind_array(io.bind_input, TOKEN_IDS, ids)
        bind_array(io.bind_input, CACHE_START, starts)
        bind_array(io.bind_input, LOGIT_ROWS, logit_rows)
        bind_array(io.bind_output, CHOICE_IDS, choice_ids)
        if want_logits:
            logits = np.empty((batch, picked, self._limits.vocab_size), np.float32)
            bind_array(io.bind_output, LOGITS, logits)
        self._bind_caches(io, graph, first_slot, batch)
        return _Binding(io, ids, starts, logit_rows, choice_ids, logits)

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
            caches = {name: self._shapes[name] for name, _ in self._graph_caches[graph]}
            check_session(session, path, caches, self._limits.vocab_size)
            self._sessions[graph] = session
        return self._sessions[graph]

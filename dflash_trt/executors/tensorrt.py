"""The bundle's engines on an NVIDIA GPU: one code for TensorRT-RTX and TensorRT.

A step is two engine runs between two small copies: anchors, starts and mask ids go over, token and
choice ids come back, and the host waits once. The draft's output lies where the target's input is
bound, and caches are bound as input and output of the same memory. Each shape is bound once (a
Bucket); from its third call on it replays a CUDA graph of the whole step.

Rung 3: the engines are built and everything up to the library's own calls is tested against
stand-ins that compute; none of it has run on a GPU. `doctor --gpu-check` runs it on one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.engines.device import Device, HostBytes
from dflash_trt.engines.profiles import profiles
from dflash_trt.errors import DflashError
from dflash_trt.executors.base import (
    Candidates,
    ExecutorLimits,
    FloatArray,
    Int64Array,
    Scores,
    SpeculationOutput,
    TargetGraph,
    TargetOutput,
)
from dflash_trt.executors.binder import Binder, lay_out
from dflash_trt.executors.buckets import Bucket, Staging
from dflash_trt.executors.device_pages import DevicePages
from dflash_trt.executors.engine_bundle import EngineBundle
from dflash_trt.executors.loaded_engine import LoadedEngine
from dflash_trt.executors.loader import Loader
from dflash_trt.graph.bindings import (
    BLOCK_IDS,
    CACHE_START,
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    CHOICE_IDS,
    DRAFT_TOKEN_IDS,
    LOGIT_ROWS,
    PAGE_TABLE,
    TOKEN_IDS,
    GraphName,
)

MAX_BUCKETS = 64
# The second call of a shape shows that it comes again. It runs in contexts of its own, since
# TensorRT settles in a context's first run what a shape needs, and is captured right after.
RUNS_BEFORE_CAPTURE = 1


class TensorRtExecutor:
    """Executor over `{target,draft,target_only}.engine`.

    Args:
        bundle: the engines.
        device: where they run; the executor closes it.
        loader: opens engine files with the library that built them.

    `captured` counts the CUDA graphs that replay steps now; `capture_error` says why steps are
    enqueued one by one instead, when capturing failed.

    Raises:
        DflashError: the device has no room for caches and buffers.
    """

    def __init__(self, bundle: EngineBundle, device: Device, loader: Loader) -> None:
        self._bundle = bundle
        self._device = device
        self._loader = loader
        self._engines: dict[GraphName, LoadedEngine] = {}
        self._buckets: OrderedDict[tuple[object, ...], Bucket] = OrderedDict()
        self._held = [0] * bundle.limits.max_batch
        self._graph_caches = bundle.layout.graph_caches()
        self._scratch, self._scratch_bytes = 0, 0
        self._whole_rows: HostBytes | None = None
        self._closed = False
        self.capture_error: str | None = None
        limits, shapes = bundle.limits, bundle.shapes
        kept = bundle.candidates
        self._caches = bundle.allocate_caches(device)
        block, chunk = limits.block_size, shapes.prefill_chunk
        sizes = [(limits.max_batch, block, block), (1, chunk, min(block, chunk))]
        most = [lay_out(TOKEN_IDS, *size, kept, bundle.columns) for size in sizes]
        self._inputs = Staging(device, max(one.size for one, _ in most), "input buffers")
        self._outputs = Staging(device, max(one.size for _, one in most), "output buffers")
        rows = max(batch * picked for batch, _, picked in sizes)
        self._logits = device.allocate(rows * limits.vocab_size * 4, "logits")
        self._binder = Binder(
            self._caches,
            self._graph_caches,
            inputs=self._inputs.address,
            outputs=self._outputs.address,
            logits=self._logits,
            kept=kept,
        )

    @property
    def limits(self) -> ExecutorLimits:
        return self._bundle.limits

    @property
    def is_bitwise(self) -> bool:
        return False

    @property
    def cache_bytes(self) -> int:
        """Device memory of the caches."""
        return self._caches.nbytes

    @property
    def captured(self) -> int:
        return sum(bucket.graph is not None for bucket in self._buckets.values())

    def preload(self, graphs: Iterable[GraphName]) -> None:
        """Loads engines ahead of the first request, whose time they would count towards."""
        for graph in graphs:
            self._engine(graph)

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
        picked = logit_rows.shape[1]
        self.limits.check_logit_rows(logit_rows, rows)
        self._hold(first_slot, starts, rows)
        bound = self._caches.bound_slot(first_slot)
        key = (graph, bound, batch, rows, picked, scores is Scores.CANDIDATES)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._binder.bind_call(graph, bound, batch, rows, picked, scores)
        self._remember(key, bucket)
        self._write(bucket, TOKEN_IDS, token_ids)
        self._write_places(bucket, first_slot, starts)
        self._write(bucket, LOGIT_ROWS, logit_rows)
        logits, candidates = self._run(bucket, scores)
        return TargetOutput(self._read(bucket, CHOICE_IDS), logits, candidates)

    def speculate(
        self,
        first_slot: int,
        anchors: Int64Array,
        starts: Int64Array,
        block_size: int,
        scores: Scores,
    ) -> SpeculationOutput:
        batch = len(anchors)
        self.limits.check_block_size(block_size)
        self._hold(first_slot, starts, block_size)
        bound = self._caches.bound_slot(first_slot)
        key = ("speculate", bound, batch, block_size, scores is Scores.CANDIDATES)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._binder.bind_step(bound, batch, block_size, scores)
        self._remember(key, bucket)
        blocks = np.full((batch, block_size), self.limits.mask_token_id, np.int64)
        blocks[:, 0] = anchors
        self._write(bucket, BLOCK_IDS, blocks)
        self._write_places(bucket, first_slot, starts)
        self._write(bucket, LOGIT_ROWS, np.arange(block_size))
        logits, candidates = self._run(bucket, scores)
        return SpeculationOutput(
            self._read(bucket, DRAFT_TOKEN_IDS), self._read(bucket, CHOICE_IDS), logits, candidates
        )

    def bind_pages(self, slot: int, page_ids: Sequence[int]) -> None:
        if not isinstance(self._caches, DevicePages):
            raise ValueError("linear caches have no pages")
        self._caches.bind_pages(slot, page_ids)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self._caches.clear(destination, self._held[destination])
        self._caches.move(source, destination, length)
        self._held[destination] = length

    def release_slots(self, first_free: int) -> None:
        """Clears what the slots held; the caches' memory stays as it is."""
        for slot in range(first_free, len(self._held)):
            if self._held[slot]:
                self._caches.clear(slot, self._held[slot])
                self._held[slot] = 0

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._loader.save_kernels()
        finally:
            # Contexts before the memory that they compute in.
            self._buckets.clear()
            self._engines.clear()
            self._device.close()

    def _run(self, bucket: Bucket, scores: Scores) -> tuple[FloatArray | None, Candidates | None]:
        """One call, waited for; whole rows or candidates as `scores` asks."""
        will_capture = bucket.runs == RUNS_BEFORE_CAPTURE and self._is_capturable(bucket)
        if bucket.graph is not None:
            self._device.launch(bucket.graph)
        else:
            if will_capture:
                self._dedicate(bucket)
            self._enqueue(bucket)
            bucket.runs += 1
        shape = (*bucket.outputs.shape(CHOICE_IDS), self.limits.vocab_size)
        logits = None
        if scores is Scores.LOGITS:
            # Not part of what is captured: the memory that rows go to may grow.
            logits = self._download_rows(0, shape)
        self._device.synchronize()
        if will_capture:
            self._capture(bucket)
        if scores is not Scores.CANDIDATES:
            return logits, None

        def read_row(sequence: int, row: int) -> FloatArray:
            whole = self._download_rows(sequence * shape[1] + row, shape[2:])
            self._device.synchronize()
            return whole.copy()

        values: FloatArray = self._read(bucket, CANDIDATE_LOGITS)
        return None, Candidates(self._read(bucket, CANDIDATE_IDS), values, read_row)

    def _enqueue(self, bucket: Bucket) -> None:
        self._inputs.upload(bucket.inputs.size)
        for index, call in enumerate(bucket.passes):
            if bucket.contexts:
                bucket.contexts[index].enqueue(call)
            else:
                self._engine(call.graph).shared_context(call).enqueue(call)
        self._outputs.download(bucket.copied)

    def _is_capturable(self, bucket: Bucket) -> bool:
        """Chunks of prompts come in too many sizes to keep a graph of each."""
        is_decode = all(call.axes["S"] <= self.limits.block_size for call in bucket.passes)
        return is_decode and self.capture_error is None

    def _dedicate(self, bucket: Bucket) -> None:
        """Gives a bucket contexts of its own: a graph is good as long as its context's state."""
        bucket.contexts = [
            self._engine(call.graph).make_context(call, self._scratch, self._scratch_bytes)
            for call in bucket.passes
        ]

    def _capture(self, bucket: Bucket) -> None:
        """Records the call that has just run; nothing runs meanwhile."""
        self._device.begin_capture()
        try:
            self._enqueue(bucket)
        except DflashError as error:
            self._device.abandon_capture()
            self.capture_error = error.message
            return
        try:
            bucket.graph = self._device.end_capture()
        except DflashError as error:
            self.capture_error = error.message

    def _download_rows(self, first_row: int, shape: tuple[int, ...]) -> FloatArray:
        """Logits of `shape` [..., V] from row `first_row` on, to be waited for."""
        size = int(np.prod(shape)) * 4
        if self._whole_rows is None or self._whole_rows.nbytes < size:
            if self._whole_rows is not None:
                self._device.synchronize()
                self._device.free_host(self._whole_rows)
            self._whole_rows = self._device.allocate_host(size)
        memory = self._whole_rows[:size]
        self._device.download(memory, self._logits + first_row * self.limits.vocab_size * 4)
        return memory.view(np.float32).reshape(shape)

    def _write(self, bucket: Bucket, name: str, values: npt.NDArray[np.int64]) -> None:
        bucket.inputs.view(self._inputs.host, name)[...] = values

    def _write_places(self, bucket: Bucket, first_slot: int, starts: Int64Array) -> None:
        """Where the rows go: starts, and in paged caches the pages of every sequence."""
        self._write(bucket, CACHE_START, starts)
        if isinstance(self._caches, DevicePages):
            table = bucket.inputs.view(self._inputs.host, PAGE_TABLE)
            self._caches.fill(table, first_slot)

    def _read(self, bucket: Bucket, name: str) -> npt.NDArray[Any]:
        return bucket.outputs.view(self._outputs.host, name)

    def _hold(self, first_slot: int, starts: Int64Array, rows: int) -> None:
        """Notes what this call writes.

        Raises:
            ValueError: slots or positions outside the limits or a slot's pages, before anything
                is enqueued: TensorRT does not define a write past a cache's end.
        """
        if self._closed:
            raise ValueError("the executor is closed")
        ends = self.limits.slot_ends(first_slot, starts, rows)
        if isinstance(self._caches, DevicePages):
            self._caches.check(ends)
        for slot, end in ends.items():
            self._held[slot] = max(self._held[slot], end)

    def _remember(self, key: tuple[object, ...], bucket: Bucket) -> None:
        self._buckets[key] = bucket
        self._buckets.move_to_end(key)
        if len(self._buckets) > MAX_BUCKETS:
            _, oldest = self._buckets.popitem(last=False)
            self._forget_graph(oldest)

    def _forget_graph(self, bucket: Bucket) -> None:
        if bucket.graph is not None:
            self._device.destroy_graph(bucket.graph)
        bucket.graph, bucket.contexts, bucket.runs = None, (), 0

    def _engine(self, graph: GraphName) -> LoadedEngine:
        """Loads an engine at its first use: plain generation never loads the draft."""
        if graph not in self._engines:
            built = profiles(graph, self._bundle.shapes)
            native = self._loader.load(self._bundle.paths[graph])
            self._bundle.check(graph, native)
            engine = LoadedEngine(graph, native, built, self._loader, self._device.stream)
            self._share_scratch(engine)
            self._engines[graph] = engine
        return self._engines[graph]

    def _share_scratch(self, engine: LoadedEngine) -> None:
        """One memory for all engines, as large as the largest wants: they run in turn."""
        if engine.scratch_bytes > self._scratch_bytes:
            self._device.synchronize()
            for bucket in self._buckets.values():  # captured with the memory that goes
                self._forget_graph(bucket)
            if self._scratch:
                self._device.free(self._scratch)
            self._scratch = self._device.allocate(engine.scratch_bytes, "activations")
            self._scratch_bytes = engine.scratch_bytes
            for other in self._engines.values():
                other.use_scratch(self._scratch, self._scratch_bytes)
        engine.use_scratch(self._scratch, self._scratch_bytes)

"""The bundle's engines on an NVIDIA GPU: one code for TensorRT-RTX and TensorRT.

A step is two engine runs between two small copies, and the host waits once. Each shape is bound
once (a BoundCall); from its third call on it replays a CUDA graph of the step's passes.

Rung 3: tested up to the library's own calls, against stand-ins that compute; none of it has run on
a GPU. `doctor --gpu-check` runs it on one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.backends.base import (
    Candidates,
    FloatArray,
    Int64Array,
    Scores,
    SpeculationOutput,
    StepCall,
    TargetCall,
    TargetOutput,
)
from dflash_trt.backends.tensorrt.run.bound_calls import (
    STEP,
    Binder,
    BoundCall,
    Graphs,
    Results,
    Staging,
    pack,
)
from dflash_trt.backends.tensorrt.run.device_caches import DeviceCaches, DevicePages
from dflash_trt.backends.tensorrt.run.engines import EngineBundle, Loader
from dflash_trt.backends.tensorrt.run.lookahead import Lookahead, Step
from dflash_trt.backends.tensorrt.run.pass_runner import PassRunner
from dflash_trt.graph.bindings import (
    BLOCK_IDS,
    CACHE_START,
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    CHOICE_IDS,
    DRAFT_TOKEN_IDS,
    LOGIT_ROWS,
    PAGE_TABLE,
    SAMPLING,
    TOKEN_IDS,
    GraphName,
)
from dflash_trt.hardware.device import Device, HostBytes


class TensorRtExecutor:
    """Executor over `{target,draft,target_only}.engine`.

    Args:
        bundle: the engines.
        device: where they run; the executor closes it.
        loader: opens engine files with the library that built them.

    `runner` and `lookahead` tell what was captured and begun ahead, `caches` what they take.

    Raises:
        DflashError: the device has no room for caches and buffers.
    """

    is_bitwise = False

    def __init__(self, bundle: EngineBundle, device: Device, loader: Loader) -> None:
        self.limits = limits = bundle.limits
        self._device = device
        self._loader = loader
        self.runner = PassRunner(bundle, device, loader)
        self._held = [0] * limits.max_batch
        self._whole_rows: HostBytes | None = None
        self._is_waited_for = True
        self._closed = False
        self.caches = _allocate_caches(bundle, device)
        block, chunk = limits.block_size, limits.prefill_chunk
        decode = {"B": limits.max_batch, "S": block, "R": block}
        prefill = {"B": 1, "S": chunk, "R": min(block, chunk)}
        known: list[tuple[Graphs, dict[str, int]]] = [
            (STEP, decode),
            (("target",), decode),
            (("target",), prefill),
        ]
        most = [pack([bundle.tensors(one) for one in graphs], axes) for graphs, axes in known]
        self._inputs = Staging(device, max(one.size for one, _ in most), "input buffers")
        self._results = Results(device, max(one.size for _, one in most), "output buffers")
        self._pages = self.caches if isinstance(self.caches, DevicePages) else None
        self.lookahead = Lookahead(device, self._inputs, self._results, self._pages)
        rows = max(axes["B"] * axes["R"] for axes in (decode, prefill))
        self._logits = device.allocate(rows * limits.vocab_size * 4, "logits")
        self._binder = Binder(
            bundle,
            self.caches,
            inputs=self._inputs.address,
            outputs=self._results.address,
            logits=self._logits,
        )

    def preload(self, graphs: Iterable[GraphName]) -> None:
        """Loads engines ahead of the first request, whose time they would count towards."""
        for graph in graphs:
            self.runner.engine(graph)

    def forward(self, call: TargetCall) -> TargetOutput:
        self._hold(call)
        scores, picked = self._known(call.scores), call.logit_rows.shape[1]
        axes = {"B": call.batch, "S": call.rows, "R": picked}
        bound = self._bind((call.graph,), call.first_slot, axes, scores)
        self._enter_call()
        self.lookahead.drop()
        ids = {TOKEN_IDS: call.token_ids, LOGIT_ROWS: call.logit_rows}
        logits = self._begin(bound, call, ids, scores)
        return TargetOutput(self._finish(bound), logits, self._candidates(bound, scores))

    def speculate(self, call: StepCall) -> SpeculationOutput:
        self._hold(call)
        scores, rows = self._known(call.scores), call.rows
        bound = self._bind(STEP, call.first_slot, {"B": call.batch, "S": rows, "R": rows}, scores)
        step = Step(bound, call)
        logits = None
        self._enter_call()
        if scores is not Scores.NONE or not self.lookahead.take(step):
            self.lookahead.drop()
            blocks = call.block_ids(self.limits.mask_token_id)
            ids = {BLOCK_IDS: blocks, LOGIT_ROWS: np.arange(rows)}
            logits = self._begin(bound, call, ids, scores)
        if call.ahead and self.limits.draws and scores is Scores.NONE:
            self._go_on(step)
        choices = self._finish(bound)
        drafted = self._read(bound, DRAFT_TOKEN_IDS)
        return SpeculationOutput(drafted, choices, logits, self._candidates(bound, scores))

    def bind_pages(self, slot: int, page_ids: Sequence[int]) -> None:
        if self._pages is None:
            raise ValueError("linear caches have no pages")
        # Calls that are enqueued have their own table: what they write stays where it was bound.
        before = self._pages.count(slot)
        if self._pages.bind(slot, page_ids) != before:
            self.lookahead.drop()  # of what it may have written there, nothing is left

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self.lookahead.drop()
        self.caches.clear(destination, self._held[destination])
        self.caches.move(source, destination, length)
        self._held[destination] = length

    def release_slots(self, first_free: int) -> None:
        """Clears what the slots held; the caches' memory stays as it is."""
        self.lookahead.drop()
        for slot in range(first_free, len(self._held)):
            if self._held[slot]:
                self.caches.clear(slot, self._held[slot])
                self._held[slot] = 0

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.lookahead.drop()
        try:
            self._loader.save_kernels()
        finally:
            try:
                self._device.synchronize()  # a dropped step's contexts may be at work
            finally:
                # Contexts before the memory that they compute in.
                self.runner.close()
                self._device.close()

    def _bind(
        self, graphs: Graphs, first_slot: int, axes: Mapping[str, int], scores: Scores
    ) -> BoundCall:
        slot = self.caches.bound_slot(first_slot)
        key = (graphs, slot, *axes.values(), scores is Scores.CANDIDATES)
        return self.runner.recall(key, partial(self._binder.bind, graphs, slot, axes, scores))

    def _enter_call(self) -> None:
        """Begins a call, once one that an error broke off has left the host's buffers."""
        if not self._is_waited_for:
            self.lookahead.drop()
            self._device.synchronize()
        self._is_waited_for = False

    def _begin(
        self,
        bound: BoundCall,
        call: TargetCall | StepCall,
        ids: Mapping[str, Int64Array],
        scores: Scores,
    ) -> FloatArray | None:
        """Enqueues a call; the whole rows, to be waited for, if `scores` asks for them."""
        arguments = {**ids, CACHE_START: call.starts}
        if call.sampling is not None:
            arguments[SAMPLING] = call.sampling
        for name, values in arguments.items():
            bound.inputs.view(self._inputs.host, name)[...] = values
        if self._pages is not None:
            self._pages.fill(bound.inputs.view(self._inputs.host, PAGE_TABLE), call.first_slot)
        self._inputs.upload(bound.inputs.size)
        self.runner.run(bound)
        logits = None
        if scores is Scores.LOGITS:
            # Not part of what is captured: the memory that rows go to may grow.
            shape = (*bound.outputs.shape(CHOICE_IDS), self.limits.vocab_size)
            logits = self._download_rows(0, shape)
        self._results.download(bound.copied)
        return logits

    def _go_on(self, step: Step) -> None:
        """Enqueues the step behind `step` too, if it replays a graph and its rows will fit."""
        if step.bound.graph is None:
            return
        try:
            self._hold(replace(step.call, starts=step.call.starts + step.call.rows))
        except ValueError:
            return
        self.lookahead.start(step)

    def _finish(self, bound: BoundCall) -> Int64Array:
        """Waits for the call; its choices."""
        self._results.wait()
        self._is_waited_for = True
        self.runner.capture(bound)
        choices: Int64Array = self._read(bound, CHOICE_IDS)
        return choices

    def _candidates(self, bound: BoundCall, scores: Scores) -> Candidates | None:
        """The candidates of a call that has been waited for, if `scores` asks for them."""
        if scores is not Scores.CANDIDATES:
            return None
        rows, vocabulary = bound.outputs.shape(CHOICE_IDS)[1], self.limits.vocab_size

        def read_row(sequence: int, row: int) -> FloatArray:
            whole = self._download_rows(sequence * rows + row, (vocabulary,))
            self._device.synchronize()
            return whole.copy()

        values: FloatArray = self._read(bound, CANDIDATE_LOGITS)
        return Candidates(self._read(bound, CANDIDATE_IDS), values, read_row)

    def _known(self, scores: Scores) -> Scores:
        """What serves `scores`: engines that draw have no candidates, but whole rows."""
        return Scores.LOGITS if scores and self.limits.draws else scores

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

    def _read(self, bound: BoundCall, name: str) -> npt.NDArray[Any]:
        return bound.outputs.view(self._results.host, name)

    def _hold(self, call: TargetCall | StepCall) -> None:
        """Notes what `call` writes.

        Raises:
            ValueError: it is outside the limits or a slot's pages; nothing has been enqueued.
        """
        if self._closed:
            raise ValueError("the executor is closed")
        ends = self.limits.check(call)
        if self._pages is not None:
            self._pages.check(ends)
        for slot, end in ends.items():
            self._held[slot] = max(self._held[slot], end)


def _allocate_caches(bundle: EngineBundle, device: Device) -> DeviceCaches | DevicePages:
    """The caches of target and draft on `device`.

    Raises:
        DflashError: it has no room.
    """
    shapes, form, limits = bundle.layout.shapes(), bundle.form, bundle.limits
    slots, pool, item_bytes = limits.max_batch, limits.page_pool, form.cache_item_bytes
    assert form.cache_length is not None
    if pool is None:
        return DeviceCaches(device, shapes, slots, form.cache_length, item_bytes)
    columns = pool.cover(form.cache_length)
    return DevicePages(device, shapes, slots, pool, columns=columns, item_bytes=item_bytes)

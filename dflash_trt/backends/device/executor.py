"""A bundle on a device: one code for TensorRT's engines and PyTorch's graphs, its kinds of pass.

A step is two passes between two small copies, and the host waits once. Calls are padded to few
shapes (padding.py), each of which is bound once (a BoundCall); a step of one that has come before,
or that `warm_up` has run, replays a CUDA graph of its passes.

Rung 3: tested up to the library's own calls, against stand-ins that compute; none of it has run on
a GPU. `doctor --gpu-check` runs it on one.
"""

from __future__ import annotations

import time
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
    TargetGraph,
    TargetOutput,
)
from dflash_trt.backends.device.bound_calls import (
    STEP,
    BoundCall,
    CallBuffers,
    Graphs,
    Results,
    Staging,
    pack,
)
from dflash_trt.backends.device.device_caches import (
    DeviceCaches,
    DevicePages,
    DeviceStates,
)
from dflash_trt.backends.device.lookahead import Lookahead, Step
from dflash_trt.backends.device.padding import Frame, SlotRows
from dflash_trt.backends.device.pass_runner import PassRunner
from dflash_trt.backends.device.passes import PassBundle, PassLoader
from dflash_trt.graph import bindings as io
from dflash_trt.graph.bindings import GraphName
from dflash_trt.graph.gated_delta import IDLE
from dflash_trt.hardware.device import Device, HostBytes

WARM_UP_SECONDS = 60.0


class DeviceExecutor:
    """Executor over the passes `target`, `draft` and `target_only`.

    Args:
        bundle: the files of the passes.
        device: where they run; the executor closes it.
        loader: opens the files with the library that runs them.

    `runner` and `lookahead` tell what was captured and begun ahead, `caches` what they take,
    `states` the recurrent layers'.

    Raises:
        DflashError: the device has no room for caches and buffers.
    """

    is_bitwise = False

    def __init__(self, bundle: PassBundle, device: Device, loader: PassLoader) -> None:
        self.limits = limits = bundle.limits
        self._bundle, self._device, self._loader = bundle, device, loader
        self.runner = PassRunner(bundle, device, loader)
        self._rows = SlotRows(limits)
        self._whole_rows: HostBytes | None = None
        self._is_waited_for = True
        self._closed = False
        self.caches: DeviceCaches | DevicePages = (
            DeviceCaches(bundle, device)
            if limits.page_pool is None
            else DevicePages(bundle, device, limits.page_pool)
        )
        self.states = DeviceStates(bundle, device)
        block, chunk = limits.block_size, limits.prefill_chunk
        decode = {"B": limits.max_batch, "S": block, "R": block}
        prefill = {"B": 1, "S": chunk, "R": min(block, chunk)}
        known: list[tuple[Graphs, dict[str, int]]] = [(STEP, decode)]
        known += [(("target",), axes) for axes in (decode, prefill)]
        most = [pack([bundle.tensors(one) for one in graphs], axes) for graphs, axes in known]
        self._inputs = Staging(device, max(one.size for one, _ in most), "input buffers")
        self._results = Results(device, max(one.size for _, one in most), "output buffers")
        self._pages = self.caches if isinstance(self.caches, DevicePages) else None
        self.lookahead = Lookahead(device, self._inputs, self._results, self._pages)
        rows = max(axes["B"] * axes["R"] for axes in (decode, prefill))
        self._logits = device.allocate(rows * limits.vocab_size * 4, "logits")
        self._buffers = CallBuffers(self._inputs.address, self._results.address, self._logits)

    @property
    def device(self) -> Device:
        """Where the caches lie. What others do on it goes to the same stream, in order."""
        return self._device

    def preload(self, graphs: Iterable[GraphName]) -> None:
        """Loads passes ahead of the first request, whose time they would count towards."""
        for graph in graphs:
            self.runner.engine(graph)

    def warm_up(self, rows: Mapping[int, int], plain: TargetGraph) -> None:
        """Runs the shapes of these steps, and of prompts, over idle rows; captures the steps.

        What is not done after WARM_UP_SECONDS is left to the first call that needs it.
        """
        deadline = time.monotonic() + WARM_UP_SECONDS
        for call, frame in self._rows.usual_calls(rows, plain):
            if time.monotonic() > deadline:
                break
            bound = self._bind(call, frame)
            self.runner.expect(bound)
            self._enter_call()
            self._enqueue(bound, call, frame, Scores.NONE, {})
            self._finish(bound)
        self._loader.save_kernels()

    def forward(self, call: TargetCall) -> TargetOutput:
        ends = self._check(call)
        scores, frame = self._known(call.scores), self._rows.frame(call)
        bound = self._bind(call, frame)
        self._enter_call()
        logits = self._enqueue(bound, call, frame, scores, ends)
        choices = self._finish(bound)[frame.live]
        self.states.end(call.slots, call.starts, call.rows)
        return TargetOutput(choices, logits, self._candidates(bound, frame, scores))

    def speculate(self, call: StepCall) -> SpeculationOutput:
        ends = self._check(call)
        scores, frame = self._known(call.scores), self._rows.frame(call)
        bound, logits = self._bind(call, frame), None
        step = Step(bound, call, frame)
        self._enter_call()
        if scores is Scores.NONE and self.lookahead.take(step):
            self._rows.hold(ends)
        else:
            logits = self._enqueue(bound, call, frame, scores, ends)
        # A step that nobody asks for would take a state past rows that it must not have.
        if call.ahead and self.limits.draws and scores is Scores.NONE and not self.states:
            self._go_on(step)
        choices = self._finish(bound)[frame.live]
        self.states.end(call.slots, call.starts, call.rows)
        self.lookahead.know()
        drafted = self._read(bound, io.DRAFT_TOKEN_IDS)[frame.live]
        return SpeculationOutput(drafted, choices, logits, self._candidates(bound, frame, scores))

    def bind_pages(self, slot: int, page_ids: Sequence[int], window: int | None = None) -> None:
        if self._pages is None:
            raise ValueError("linear caches have no pages")
        # Calls that are enqueued have their own tables: what they write stays where it was bound.
        if not self._pages.bind(slot, page_ids, window):
            self.lookahead.drop()  # of what it may have written there, nothing is left
        if window is None and not page_ids:
            self._rows.replace(slot, 0)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self.lookahead.drop()
        self.caches.clear(destination, self._rows.replace(destination, length))
        self.caches.move(source, destination, length)
        self.states.move(source, destination)

    def release_slots(self, first_free: int) -> None:
        """Clears what the slots held; the caches' memory stays as it is."""
        self.lookahead.drop()
        for slot in range(first_free, self.limits.max_batch):
            if self._rows.is_held(slot):
                self.caches.clear(slot, self._rows.replace(slot, 0))
                self.states.clear(slot)

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

    def _bind(self, call: TargetCall | StepCall, frame: Frame) -> BoundCall:
        graphs, picked = STEP, call.rows
        if isinstance(call, TargetCall):
            graphs, picked = (call.graph,), call.logit_rows.shape[1]
        axes = {"B": frame.batch, "S": frame.rows, "R": picked}
        slot = frame.first_slot if self.states else self.caches.bound_slot(frame.first_slot)

        def address(name: str) -> int:
            return (self.states if name in self.states else self.caches).address(name, slot)

        key = (graphs, slot, *axes.values())
        bind = partial(self._buffers.bind, self._bundle, graphs, axes, address)
        return self.runner.recall(key, bind)

    def _enter_call(self) -> None:
        """Begins a call, once one that an error broke off has left the host's buffers."""
        if not self._is_waited_for:
            self.lookahead.drop()
            self._device.synchronize()
        self._is_waited_for = False

    def _enqueue(
        self,
        bound: BoundCall,
        call: TargetCall | StepCall,
        frame: Frame,
        scores: Scores,
        ends: Mapping[int, int],
    ) -> FloatArray | None:
        """Enqueues a call whose rows end at `ends`, by slot.

        Returns the whole rows, to be waited for, if `scores` asks for them.
        """
        self.lookahead.drop(call.slots)
        self.lookahead.fills(bound, call.first_slot)
        self._clear_idle(call.slots)
        self._rows.hold(ends)
        self._fill(bound, call, frame)
        self._inputs.upload(bound.inputs.size)
        self.states.lose(call.slots)
        self.runner.run(bound, is_step=call.is_step)
        logits = None
        if scores is Scores.LOGITS:
            # Not part of what is captured: the memory that rows go to may grow.
            picked = bound.outputs.shape(io.CHOICE_IDS)[1]
            shape = (call.batch, picked, self.limits.vocab_size)
            logits = self._download_rows(frame.live.start * picked, shape)
        self._results.download(bound.copied(scores))
        return logits

    def _fill(self, bound: BoundCall, call: TargetCall | StepCall, frame: Frame) -> None:
        """Writes a call's inputs, zeros for idle rows, where they are uploaded from."""
        host = self._inputs.host
        if isinstance(call, StepCall):
            blocks = call.block_ids(self.limits.mask_token_id)
            arguments = {io.BLOCK_IDS: blocks, io.LOGIT_ROWS: np.arange(call.rows)}
        else:
            arguments = {io.TOKEN_IDS: call.token_ids, io.LOGIT_ROWS: call.logit_rows}
        if call.sampling is not None:
            arguments[io.SAMPLING] = call.sampling
        for name, values in arguments.items():
            view = bound.inputs.view(host, name)
            view[...] = 0
            view[frame.live, : values.shape[-1]] = values
        starts = bound.inputs.view(host, io.CACHE_START)
        starts[...] = frame.starts
        starts[frame.live] = call.starts
        self._rows.note(frame, starts)
        for name, held in self.states.places().items():
            view = bound.inputs.view(host, name)
            view[...] = 0 if name == io.ROWS_SIDE else IDLE
            view[frame.live] = held[call.slots.start : call.slots.stop]
        if self._pages is not None:
            for name in bound.inputs.page_tables:
                table = bound.inputs.view(host, name)
                self._pages.fill(name, table, call.slots, first=frame.live.start)

    def _clear_idle(self, slots: Iterable[int]) -> None:
        """Zeroes what idle rows left behind what `slots` hold: it may have overflowed."""
        if isinstance(self.caches, DeviceCaches):
            for slot, begin, end in self._rows.take_idle(slots):
                self.caches.clear(slot, end, begin=begin)

    def _go_on(self, step: Step) -> None:
        """Enqueues the step behind `step` too, if the device has its inputs and its rows fit."""
        if step.bound.graph is None or not self.lookahead.has_inputs(step):
            return
        try:
            ends = self._check(replace(step.call, starts=step.call.starts + step.call.rows))
        except ValueError:
            return
        self._rows.hold(ends)
        self.lookahead.start(step)

    def _finish(self, bound: BoundCall) -> Int64Array:
        """Waits for the call; its choices."""
        self._results.wait()
        self._is_waited_for = True
        self.runner.capture(bound)
        choices: Int64Array = self._read(bound, io.CHOICE_IDS)
        return choices

    def _candidates(self, bound: BoundCall, frame: Frame, scores: Scores) -> Candidates | None:
        """The candidates of a call that has been waited for, if `scores` asks for them."""
        if scores is not Scores.CANDIDATES:
            return None
        rows, vocabulary = bound.outputs.shape(io.CHOICE_IDS)[1], self.limits.vocab_size

        def read_row(sequence: int, row: int) -> FloatArray:
            place = (frame.live.start + sequence) * rows + row
            whole = self._download_rows(place, (vocabulary,))
            self._device.synchronize()
            return whole.copy()

        ids, values = (self._read(bound, name) for name in (io.CANDIDATE_IDS, io.CANDIDATE_LOGITS))
        return Candidates(ids[frame.live], values[frame.live], read_row)

    def _known(self, scores: Scores) -> Scores:
        """What serves `scores`: passes that draw have no candidates, but whole rows."""
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

    def _check(self, call: TargetCall | StepCall) -> dict[int, int]:
        """Where the rows of `call` end, by slot.

        Raises:
            ValueError: it is outside the limits or a slot's pages; nothing has been enqueued.
        """
        if self._closed:
            raise ValueError("the executor is closed")
        ends = self.limits.check(call)
        if self._pages is not None:
            self._pages.check(ends, call.rows)
        self.states.begin(call.slots, call.starts)
        return ends

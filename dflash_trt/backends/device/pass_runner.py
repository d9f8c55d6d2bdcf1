"""Runs bound calls: passes, loaded at their first use, and CUDA graphs of what comes again.

A context only ever has one shape: with another, plugins that were compiled ahead of time load their
kernels once more and never let go of those before (NVIDIA/TensorRT issue 4849). Calls of one shape
share a context until a step comes a second time. Then it gets contexts of its own, since TensorRT
settles in a context's first run what a shape needs, and is captured once it has been waited for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from dflash_trt.backends.device.bound_calls import BoundCall
from dflash_trt.backends.device.passes import Pass, PassBundle, PassContext, PassLoader
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GraphName
from dflash_trt.hardware.device import Device

MAX_CALLS = 64
MAX_CONTEXTS = 64
"""Contexts of one shape each, beside those of captured steps."""
RUNS_BEFORE_CAPTURE = 1


class PassRunner:
    """The passes of a bundle, their memory, and the calls that have been bound.

    `capture_error` says why passes are enqueued one by one, when capturing failed.
    """

    def __init__(self, bundle: PassBundle, device: Device, loader: PassLoader) -> None:
        self._bundle = bundle
        self._device = device
        self._loader = loader
        self._loaded: dict[GraphName, Any] = {}
        self._calls: OrderedDict[tuple[object, ...], BoundCall] = OrderedDict()
        self._contexts: OrderedDict[tuple[object, ...], PassContext] = OrderedDict()
        self._scratch, self._scratch_bytes = 0, 0
        self.capture_error: str | None = None

    @property
    def captured(self) -> int:
        """CUDA graphs that replay passes now."""
        return sum(call.graph is not None for call in self._calls.values())

    def recall(self, key: tuple[object, ...], bind: Callable[[], BoundCall]) -> BoundCall:
        """The call named `key`, bound now if it is new; the one unused for longest may go.

        One without a graph goes first: it costs nothing to bind it again.
        """
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = bind()
        self._calls.move_to_end(key)
        if len(self._calls) > MAX_CALLS:
            *others, _ = self._calls.items()
            oldest = next((name for name, one in others if one.graph is None), others[0][0])
            self._forget_graph(self._calls.pop(oldest))
        return call

    def expect(self, call: BoundCall) -> None:
        """Says that a call will come again, before it has come at all."""
        call.runs = max(call.runs, RUNS_BEFORE_CAPTURE)

    def run(self, call: BoundCall, *, is_step: bool) -> None:
        """Enqueues a call's passes, or the graph of them.

        Only steps are captured; a chunk of a prompt would need a graph for every slot.
        """
        if call.graph is not None:
            self._device.launch(call.graph)
            return
        if is_step and call.runs == RUNS_BEFORE_CAPTURE and self.capture_error is None:
            self._dedicate(call)
        self._enqueue(call)
        call.runs += is_step

    def capture(self, call: BoundCall) -> None:
        """Records the passes that have just run, if it is time to; nothing runs meanwhile."""
        if not call.contexts or call.graph is not None or self.capture_error is not None:
            return
        self._device.begin_capture()
        try:
            self._enqueue(call)
        except DflashError as error:
            self._device.abandon_capture()
            self.capture_error = error.message
            return
        try:
            call.graph = self._device.end_capture()
        except DflashError as error:
            self.capture_error = error.message

    def engine(self, graph: GraphName) -> Any:
        """Loads a pass at its first use: plain generation never loads the draft."""
        if graph not in self._loaded:
            native, scratch = self._loader.load(self._bundle, graph)
            self._grow_scratch(scratch)
            self._loaded[graph] = native
        return self._loaded[graph]

    def close(self) -> None:
        """Lets contexts and passes go; nothing may be under way."""
        self._calls.clear()
        self._contexts.clear()
        self._loaded.clear()

    def _enqueue(self, call: BoundCall) -> None:
        for index, part in enumerate(call.passes):
            context = call.contexts[index] if call.contexts else self._shared_context(part)
            context.enqueue(part)

    def _shared_context(self, part: Pass) -> PassContext:
        """The context of the shape of `part`, for calls that have none of their own."""
        key = (part.graph, *part.axes.values())
        if key not in self._contexts:
            self._contexts[key] = self._make_context(part)
            if len(self._contexts) > MAX_CONTEXTS:
                self._device.synchronize()
                self._contexts.popitem(last=False)
        self._contexts.move_to_end(key)
        return self._contexts[key]

    def _make_context(self, part: Pass) -> PassContext:
        """A context for the shape of `part`; ValueError where there is none."""
        loaded, stream = self.engine(part.graph), self._device.stream
        context = self._loader.make_context(self._bundle, part, loaded, stream)
        context.use_scratch(self._scratch, self._scratch_bytes)
        return context

    def _dedicate(self, call: BoundCall) -> None:
        """Gives a call contexts of its own: a graph is good as long as its context's state."""
        for part in call.passes:
            self.engine(part.graph)  # the memory of all may grow for it
        call.contexts = [self._make_context(part) for part in call.passes]

    def _forget_graph(self, call: BoundCall) -> None:
        if call.graph is not None:
            self._device.destroy_graph(call.graph)
        call.graph, call.contexts, call.runs = None, (), 0

    def _grow_scratch(self, size: int) -> None:
        """One memory for all passes, as large as the largest wants: they run in turn."""
        if size <= self._scratch_bytes:
            return
        self._device.synchronize()
        for call in self._calls.values():  # captured with the memory that goes
            self._forget_graph(call)
        if self._scratch:
            self._device.free(self._scratch)
        self._scratch = self._device.allocate(size, "activations")
        self._scratch_bytes = size
        for context in self._contexts.values():
            context.use_scratch(self._scratch, size)

"""Runs the passes of buckets: engines, loaded at their first use, and graphs of what comes again.

The second call of a shape shows that it comes again. It runs in contexts of its own, since TensorRT
settles in a context's first run what a shape needs, and is captured once it has been waited for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from dflash_trt.backends.tensorrt.build.profiles import profiles
from dflash_trt.backends.tensorrt.run.buckets import Bucket
from dflash_trt.backends.tensorrt.run.engine_bundle import EngineBundle
from dflash_trt.backends.tensorrt.run.loaded_engine import LoadedEngine
from dflash_trt.backends.tensorrt.run.loader import Loader
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GraphName
from dflash_trt.hardware.device import Device

MAX_BUCKETS = 64
RUNS_BEFORE_CAPTURE = 1


class PassRunner:
    """The engines of a bundle, their memory, and the buckets that have been bound.

    `capture_error` says why passes are enqueued one by one, when capturing failed.
    """

    def __init__(self, bundle: EngineBundle, device: Device, loader: Loader) -> None:
        self._bundle = bundle
        self._device = device
        self._loader = loader
        self._engines: dict[GraphName, LoadedEngine] = {}
        self._buckets: OrderedDict[tuple[object, ...], Bucket] = OrderedDict()
        self._scratch, self._scratch_bytes = 0, 0
        self.capture_error: str | None = None

    @property
    def captured(self) -> int:
        """CUDA graphs that replay passes now."""
        return sum(bucket.graph is not None for bucket in self._buckets.values())

    def recall(self, key: tuple[object, ...], bind: Callable[[], Bucket]) -> Bucket:
        """The bucket called `key`, bound now if it is new; the one unused for longest may go.

        That one's passes have ended: at most the last call's are under way behind a caller's back.
        """
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = bind()
        self._buckets.move_to_end(key)
        if len(self._buckets) > MAX_BUCKETS:
            _, oldest = self._buckets.popitem(last=False)
            self._forget_graph(oldest)
        return bucket

    def run(self, bucket: Bucket) -> None:
        """Enqueues a bucket's passes, or the graph of them."""
        if bucket.graph is not None:
            self._device.launch(bucket.graph)
            return
        if bucket.runs == RUNS_BEFORE_CAPTURE and self._is_capturable(bucket):
            self._dedicate(bucket)
        self._enqueue(bucket)
        bucket.runs += 1

    def capture(self, bucket: Bucket) -> None:
        """Records the passes that have just run, if it is time to; nothing runs meanwhile."""
        if not bucket.contexts or bucket.graph is not None or self.capture_error is not None:
            return
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

    def engine(self, graph: GraphName) -> LoadedEngine:
        """Loads an engine at its first use: plain generation never loads the draft."""
        if graph not in self._engines:
            built = profiles(graph, self._bundle.limits)
            native = self._loader.load(self._bundle.paths[graph])
            self._bundle.check(graph, native)
            engine = LoadedEngine(graph, native, built, self._loader, self._device.stream)
            self._share_scratch(engine)
            self._engines[graph] = engine
        return self._engines[graph]

    def close(self) -> None:
        """Lets contexts and engines go; nothing may be under way."""
        self._buckets.clear()
        self._engines.clear()

    def _enqueue(self, bucket: Bucket) -> None:
        for index, call in enumerate(bucket.passes):
            if bucket.contexts:
                bucket.contexts[index].enqueue(call)
            else:
                self.engine(call.graph).shared_context(call).enqueue(call)

    def _is_capturable(self, bucket: Bucket) -> bool:
        """Chunks of prompts come in too many sizes to keep a graph of each."""
        block = self._bundle.limits.block_size
        is_decode = all(call.axes["S"] <= block for call in bucket.passes)
        return is_decode and self.capture_error is None

    def _dedicate(self, bucket: Bucket) -> None:
        """Gives a bucket contexts of its own: a graph is good as long as its context's state."""
        bucket.contexts = [
            self.engine(call.graph).make_context(call, self._scratch, self._scratch_bytes)
            for call in bucket.passes
        ]

    def _forget_graph(self, bucket: Bucket) -> None:
        if bucket.graph is not None:
            self._device.destroy_graph(bucket.graph)
        bucket.graph, bucket.contexts, bucket.runs = None, (), 0

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

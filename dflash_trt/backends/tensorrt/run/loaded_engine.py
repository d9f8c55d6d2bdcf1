"""One graph's engine on the device: held to the manifest, then run pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_trt.backends.tensorrt.build.profiles import Profile, choose_profile
from dflash_trt.backends.tensorrt.run.buckets import Pass
from dflash_trt.backends.tensorrt.run.loader import Loader
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GraphName


class EngineContext:
    """An execution context: shapes and addresses are set when a pass is not the one before."""

    def __init__(self, graph: GraphName, native: Any, loader: Loader, stream: int) -> None:
        self._graph = graph
        self._native = native
        self._loader = loader
        self._stream = stream
        self._bound: Pass | None = None

    def use_scratch(self, address: int, size: int) -> None:
        """Gives the context the memory that it computes in."""
        self._native.set_device_memory(address, size)

    def enqueue(self, call: Pass) -> None:
        """Puts one run into the stream.

        Raises:
            DflashError: the library refuses a shape, an address or the run.
        """
        if self._bound is not call:
            self._bound = None
            for name, shape in call.shapes.items():
                if not self._native.set_input_shape(name, shape):
                    raise self._failure(f"take {name} of shape {list(shape)}")
            for name, address in call.addresses.items():
                if not self._native.set_tensor_address(name, address):
                    raise self._failure(f"bind {name}")
            self._bound = call
        if not self._native.execute_async_v3(self._stream):
            raise self._failure("run")

    def _failure(self, doing: str) -> DflashError:
        return self._loader.failure(doing, f"{self._graph}.engine")


class LoadedEngine:
    """An engine and a context per profile.

    Args:
        graph: which of the three it is.
        native: the library's engine object.
        profiles: what it was built for.
        loader: makes the contexts, and knows what the library has to say.
        stream: where everything is enqueued.
    """

    def __init__(
        self,
        graph: GraphName,
        native: Any,
        profiles: Sequence[Profile],
        loader: Loader,
        stream: int,
    ) -> None:
        self._graph = graph
        self._native = native
        self._profiles = profiles
        self._loader = loader
        self._stream = stream
        self._contexts = [self._make_context(index) for index in range(len(profiles))]
        self.scratch_bytes = max(
            int(native.get_device_memory_size_for_profile_v2(index))
            for index in range(len(profiles))
        )

    def use_scratch(self, address: int, size: int) -> None:
        """Gives the shared contexts the memory that they compute in."""
        for context in self._contexts:
            context.use_scratch(address, size)

    def shared_context(self, call: Pass) -> EngineContext:
        """The context of the profile that `call` fits best.

        Raises:
            ValueError: no profile takes a call of this size.
        """
        return self._contexts[self._choose(call)]

    def make_context(self, call: Pass, scratch: int, scratch_bytes: int) -> EngineContext:
        """A context for `call` alone."""
        context = self._make_context(self._choose(call))
        context.use_scratch(scratch, scratch_bytes)
        return context

    def _choose(self, call: Pass) -> int:
        index = choose_profile(self._profiles, call.axes)
        if index is None:
            raise ValueError(f"the {self._graph} engine takes no call of {dict(call.axes)}")
        return index

    def _make_context(self, index: int) -> EngineContext:
        native = self._loader.make_context(
            self._native, self._graph, index, self._profiles[index], self._stream
        )
        return EngineContext(self._graph, native, self._loader, self._stream)

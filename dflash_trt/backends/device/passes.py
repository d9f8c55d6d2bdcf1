"""Passes: runs of one graph each, by whatever library; what a device asks of one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dflash_trt.backends.base import ExecutorLimits
from dflash_trt.graph.bindings import GraphName
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.tensors import CacheLayout, GraphTensor, graph_tensors


@dataclass(frozen=True, slots=True)
class PassBundle:
    """Files by graph, engines or the graphs themselves, and what they were built for.

    `plugin_caches` are the caches that each engine's plugins write. `limits` are the runtime's,
    `layout` the caches of both models, `form` that of the graphs, with their cache length.
    """

    paths: Mapping[GraphName, Path]
    plugin_caches: Mapping[GraphName, Collection[str]]
    limits: ExecutorLimits
    layout: CacheLayout
    form: GraphForm

    def tensors(self, graph: GraphName) -> tuple[GraphTensor, ...]:
        """Every input and output of a graph."""
        vocab_size, draws = self.limits.vocab_size, self.form.draws
        return graph_tensors(graph, self.form, self.layout, vocab_size, has_candidates=not draws)


@dataclass(frozen=True, slots=True)
class Pass:
    """One graph's part of a call: sizes of the axes, inputs' shapes and device addresses."""

    graph: GraphName
    axes: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    addresses: Mapping[str, int]


class PassContext(Protocol):
    """What a library needs to run passes of one shape."""

    def use_scratch(self, address: int, size: int) -> None:
        """Gives the context the memory that it computes in."""
        ...

    def enqueue(self, part: Pass) -> None:
        """Puts one run into the stream.

        Raises:
            DflashError: the library refuses a shape, an address or the run.
        """
        ...


class PassLoader(Protocol):
    """A library that runs graphs on a device: TensorRT its engines, PyTorch the graphs."""

    def load(self, bundle: PassBundle, graph: GraphName) -> tuple[Any, int]:
        """The graph, ready to run, and the bytes of scratch that its contexts want.

        Raises:
            DflashError: the file is not what the bundle says, or the library refuses it.
        """
        ...

    def make_context(self, bundle: PassBundle, part: Pass, loaded: Any, stream: int) -> PassContext:
        """A context for passes of the shape of `part`; its memory is yet to be given.

        Raises:
            DflashError: the library refuses.
            ValueError: what was `loaded` takes no such shape.
        """
        ...

    def save_kernels(self) -> None:
        """Keeps what was compiled for shapes as they came up."""
        ...

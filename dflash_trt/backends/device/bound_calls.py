"""Calls bound once: every tensor's device address, for one kind of call, slot range and shape.

A call's small inputs lie beside each other, so that one copy brings them to the device, and so do
its small outputs. All calls share the same two buffers: they run one after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from dflash_trt.backends.base import Scores
from dflash_trt.backends.device.passes import Pass, PassBundle, PassContext
from dflash_trt.graph import bindings as io
from dflash_trt.graph.bindings import GraphName
from dflash_trt.graph.tensors import GraphTensor, Role
from dflash_trt.hardware.device import Device, HostBytes, align

Graphs = tuple[GraphName, ...]
"""The graphs that a call runs, in order."""

STEP: Graphs = ("draft", "target")
"""A draft pass, and a verify pass that reads the draft's output where it lies."""

INPUTS: tuple[str, ...] = (
    *(io.BLOCK_IDS, io.TOKEN_IDS, io.CACHE_START, io.LOGIT_ROWS, io.PAGE_TABLE, io.SAMPLING),
    *(io.STATE_START, io.ROWS_END, io.ROWS_SIDE),
)
COPIED_OUTPUTS = (io.DRAFT_TOKEN_IDS, io.CHOICE_IDS, io.NEXT_BLOCK_IDS, io.NEW_START)
"""What every call copies back."""

OUTPUTS = (*COPIED_OUTPUTS, io.NEW_TOKENS, io.ACCEPTED, io.CANDIDATE_IDS, io.CANDIDATE_LOGITS)


class Staging:
    """A device buffer for inputs and its pinned twin on the host."""

    def __init__(self, device: Device, size: int, purpose: str) -> None:
        self._device, self.size = device, size
        self.address = device.allocate(size, purpose)
        self.host = device.allocate_host(size)

    def upload(self, size: int) -> None:
        self._device.upload(self.address, self.host[:size])


@dataclass(frozen=True, slots=True, eq=False)
class ResultSide:
    """Pinned memory of one call's results, and the event behind the way there."""

    host: HostBytes
    event: int


class Results:
    """A device buffer for outputs and pinned sides: a call's, and one of each step ahead."""

    def __init__(self, device: Device, size: int, purpose: str) -> None:
        self._device, self._size = device, size
        self.address = device.allocate(size, purpose)
        self._current = self._make_side()
        self._spare = [self._make_side()]

    @property
    def host(self) -> HostBytes:
        """The current call's results, once they have been waited for."""
        return self._current.host

    def turn(self, side: ResultSide) -> None:
        """Makes the results of a step ahead the current ones."""
        self._spare.append(self._current)
        self._current = side

    def give_back(self, side: ResultSide) -> None:
        """Says that nobody wants the results of a step ahead."""
        self._spare.append(side)

    def download(self, size: int) -> None:
        """Enqueues the way to the host of the current call's results."""
        self._download(size, self._current)

    def download_ahead(self, size: int) -> ResultSide:
        """Enqueues the way to a side of its own of the results of a step ahead."""
        side = self._spare.pop() if self._spare else self._make_side()
        self._download(size, side)
        return side

    def wait(self) -> None:
        """Waits for the current call, and not for what has been enqueued behind it."""
        self._device.wait(self._current.event)

    def _download(self, size: int, side: ResultSide) -> None:
        self._device.download(side.host[:size], self.address)
        self._device.record(side.event)

    def _make_side(self) -> ResultSide:
        return ResultSide(self._device.allocate_host(self._size), self._device.make_event())


class PackedTensors:
    """Small tensors of a call one after another, each aligned; `size` bytes in all.

    `spans` says where the bytes of each begin and end.
    """

    def __init__(self, tensors: Iterable[GraphTensor], axes: Mapping[str, int]) -> None:
        self.size, self.spans = 0, dict[str, tuple[int, int]]()
        self._kinds = {one.name: (one.sized(axes), one.dtype) for one in tensors}
        for name, (shape, dtype) in self._kinds.items():
            self.spans[name] = self.size, self.size + math.prod(shape) * dtype.itemsize
            self.size = align(self.spans[name][1])

    @property
    def page_tables(self) -> list[str]:
        """The page tables among them, one beside the other."""
        return [name for name in self._kinds if name.startswith(io.PAGE_TABLE)]

    def part(self, name: str, sequences: slice) -> tuple[int, int]:
        """Offset and size of some sequences' part of a tensor, whose first axis is B."""
        begin, end = self.spans[name]
        each = (end - begin) // self.shape(name)[0]
        return begin + sequences.start * each, (sequences.stop - sequences.start) * each

    def view(self, memory: HostBytes, name: str) -> npt.NDArray[Any]:
        """The tensor as an array over `memory`, which holds all of them from its first byte."""
        (begin, end), (shape, dtype) = self.spans[name], self._kinds[name]
        return memory[begin:end].view(dtype).reshape(shape)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._kinds[name][0]


def pack(
    tables: Iterable[Sequence[GraphTensor]], axes: Mapping[str, int]
) -> tuple[PackedTensors, PackedTensors]:
    """Inputs from the host and outputs of a call that runs graphs of these `tables` in turn.

    What one graph gives is no input of those after it. Logits have a buffer of their own.
    """
    given: dict[str, GraphTensor] = {}
    told: dict[str, GraphTensor] = {}
    for table in tables:
        for one in table:
            if one.role is Role.INPUT and one.name not in told:
                given[one.name] = one
            elif one.role is Role.OUTPUT and one.name != io.LOGITS:
                told[one.name] = one
    return (
        PackedTensors([given[name] for name in sorted(given, key=_place)], axes),
        PackedTensors([told[name] for name in sorted(told, key=OUTPUTS.index)], axes),
    )


def _place(name: str) -> tuple[int, str]:
    """Where an input comes; page tables of windows behind that of all other layers."""
    return INPUTS.index(io.PAGE_TABLE if name.startswith(io.PAGE_TABLE) else name), name


@dataclass(slots=True)
class BoundCall:
    """A call bound once: its passes in order, and where its arguments and results lie.

    `runs` counts a step's runs before `graph` was captured, which has `contexts` of its own, one
    per pass.
    """

    passes: tuple[Pass, ...]
    inputs: PackedTensors
    outputs: PackedTensors
    runs: int = 0
    graph: int | None = None
    contexts: Sequence[PassContext] = ()

    def copied(self, scores: Scores) -> int:
        """Bytes of the outputs that come back to the host."""
        if scores is Scores.CANDIDATES:
            return self.outputs.size
        return max(end for name, (_, end) in self.outputs.spans.items() if name in COPIED_OUTPUTS)


@dataclass(frozen=True, slots=True)
class CallBuffers:
    """Device addresses of what all calls share, which never moves."""

    inputs: int
    outputs: int
    logits: int

    def bind(
        self,
        bundle: PassBundle,
        graphs: Graphs,
        axes: Mapping[str, int],
        cache_address: Callable[[str], int],
    ) -> BoundCall:
        """A call of `graphs`, whose axes have sizes B, S and R, over caches where they lie."""
        tables = {graph: bundle.tensors(graph) for graph in graphs}
        inputs, outputs = pack(tables.values(), axes)
        places = {name: self.inputs + begin for name, (begin, _) in inputs.spans.items()}
        places |= {name: self.outputs + begin for name, (begin, _) in outputs.spans.items()}
        places[io.LOGITS] = self.logits
        passes = []
        for graph, table in tables.items():
            shapes = {one.name: one.sized(axes) for one in table if one.is_input}
            addresses = {
                one.name: cache_address(one.updates or one.name)
                if one.role in (Role.CACHE, Role.UPDATED_CACHE)
                else places[one.name]
                for one in table
            }
            passes.append(Pass(graph, axes, shapes, addresses))
        return BoundCall(tuple(passes), inputs, outputs)

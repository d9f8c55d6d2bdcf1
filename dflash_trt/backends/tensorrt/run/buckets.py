"""Shape buckets: what one call reads and writes, laid out in a pair of staging buffers.

A bucket is every call of one kind, slot range and shape. Its small inputs lie beside each other, so
that one copy brings them to the device, and so do its small outputs. All buckets share the same
two buffers: calls run one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dflash_trt.graph.bindings import GraphName
from dflash_trt.hardware.device import Device, HostBytes, align


@dataclass(frozen=True, slots=True)
class Field:
    """One small tensor of a call."""

    name: str
    shape: tuple[int, ...]
    dtype: npt.DTypeLike

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class Layout:
    """Fields one after another, each aligned; `size` bytes in all."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = {one.name: one for one in fields}
        ends = list(accumulate(align(one.nbytes) for one in fields))
        self._offsets = dict(zip(self._fields, [0, *ends[:-1]], strict=True))
        self.size = ends[-1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def offset(self, name: str) -> int:
        return self._offsets[name]

    def end(self, name: str) -> int:
        """Where the field's last byte is followed by the next."""
        return self._offsets[name] + self._fields[name].nbytes

    def view(self, memory: HostBytes, name: str) -> npt.NDArray[Any]:
        """The field as an array over `memory`, which holds the layout from its first byte."""
        one, start = self._fields[name], self._offsets[name]
        return memory[start : start + one.nbytes].view(one.dtype).reshape(one.shape)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._fields[name].shape


class Staging:
    """A device buffer for inputs and its pinned twin on the host."""

    def __init__(self, device: Device, size: int, purpose: str) -> None:
        self._device = device
        self.address = device.allocate(size, purpose)
        self.host = device.allocate_host(size)

    def upload(self, size: int) -> None:
        self._device.upload(self.address, self.host[:size])


class Results:
    """A device buffer for outputs and two pinned twins on the host.

    So one call's results can be read while those of a step ahead are on their way.
    """

    def __init__(self, device: Device, size: int, purpose: str) -> None:
        self._device = device
        self.address = device.allocate(size, purpose)
        self._sides = [(device.allocate_host(size), device.make_event()) for _ in range(2)]

    @property
    def host(self) -> HostBytes:
        """The current call's results, once they have been waited for."""
        return self._sides[0][0]

    def turn(self) -> None:
        """Makes the results ahead the current ones."""
        self._sides.reverse()

    def download(self, size: int, *, ahead: bool = False) -> None:
        """Enqueues the way to the host of the current call's results, or of those `ahead`."""
        host, event = self._sides[ahead]
        self._device.download(host[:size], self.address)
        self._device.record(event)

    def wait(self) -> None:
        """Waits for the current call, and not for what has been enqueued behind it."""
        _, event = self._sides[0]
        self._device.wait(event)


@dataclass(frozen=True, slots=True)
class Pass:
    """One engine's part of a call: sizes of its axes, tensor shapes and device addresses."""

    graph: GraphName
    axes: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    addresses: Mapping[str, int]


class PassContext(Protocol):
    """Runs passes of one engine."""

    def enqueue(self, call: Pass) -> None: ...


@dataclass(slots=True)
class Bucket:
    """A call bound once: its passes in order, and where its arguments and results lie.

    `copied` bytes of the outputs come back to the host. `runs` counts calls whose passes were
    enqueued one by one; `graph` replays the passes once they have been captured, with `contexts` of
    its own, one per pass.
    """

    passes: tuple[Pass, ...]
    inputs: Layout
    outputs: Layout
    copied: int
    runs: int = 0
    graph: int | None = None
    contexts: Sequence[PassContext] = ()

"""States of recurrent layers on a device, float32: one allocation that never moves."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from dflash_trt.backends.base import Int64Array
from dflash_trt.backends.state_positions import StatePositions
from dflash_trt.backends.tensorrt.run.device_caches import lay_out
from dflash_trt.backends.tensorrt.run.engines import EngineBundle
from dflash_trt.graph.bindings import ROWS_END, ROWS_SIDE, STATE_START
from dflash_trt.hardware.device import Device

ITEM_BYTES = 4


class DeviceStates(StatePositions):
    """What each slot's sequence has in recurrent layers, by graph input name.

    A fresh sequence reads nothing of what its slot held, so that nothing is ever cleared.

    Args:
        shapes: of one sequence, each a multiple of 256 bytes (graph/gated_delta.py).
        slots, copies, replay: see StatePositions.
        has_sides: whether rows are held twice, of which a call reads one and writes the other.

    `side` [slots + copies] is the one that each slot's next call reads.

    Raises:
        DflashError: the device has no room.
    """

    def __init__(
        self,
        device: Device,
        shapes: Mapping[str, tuple[int, ...]],
        slots: int,
        copies: int,
        replay: int,
        *,
        has_sides: bool = False,
    ) -> None:
        super().__init__(shapes, slots, copies, replay)
        self._device = device
        self._has_sides = has_sides
        held = slots + copies
        self.side = np.zeros(held, np.int64)
        self._sizes = {name: math.prod(shape) * ITEM_BYTES for name, shape in shapes.items()}
        offsets, self.nbytes = lay_out({name: held * size for name, size in self._sizes.items()})
        base = 0
        if shapes:
            base = device.allocate(self.nbytes, f"recurrent states of {held} sequences")
        self._addresses = {name: base + offset for name, offset in offsets.items()}

    def address(self, name: str, slot: int) -> int:
        """Device address of the first byte of `slot` in the named state."""
        return self._addresses[name] + slot * self._sizes[name]

    def places(self) -> dict[str, Int64Array]:
        """What a call is told of its slots, by the graphs' inputs."""
        if not self:
            return {}
        told = {STATE_START: self.state_start, ROWS_END: self.rows_end}
        return told | {ROWS_SIDE: self.side} if self._has_sides else told

    def end(self, slots: range, starts: Int64Array, rows: int) -> None:
        super().end(slots, starts, rows)
        if self._has_sides:
            self.side[slots.start : slots.stop] ^= 1

    def move(self, source: int, destination: int) -> None:
        """Copies what a slot has to another, in stream order."""
        for name, size in self._sizes.items():
            self._device.copy(self.address(name, destination), self.address(name, source), size)
        self.side[destination] = self.side[source]
        super().move(source, destination)


def allocate_states(bundle: EngineBundle, device: Device) -> DeviceStates:
    """Those of the target on `device`, and of copies.

    Raises:
        DflashError: it has no room.
    """
    layout, limits = bundle.layout, bundle.limits
    counts = limits.max_batch, limits.state_copies, limits.block_size
    return DeviceStates(device, layout.states(), *counts, has_sides=layout.has_sides)

"""States of recurrent layers on a device, float32: one allocation that never moves."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dflash_trt.backends.state_positions import StatePositions
from dflash_trt.backends.tensorrt.run.device_caches import lay_out
from dflash_trt.backends.tensorrt.run.engines import EngineBundle
from dflash_trt.hardware.device import Device

ITEM_BYTES = 4


class DeviceStates(StatePositions):
    """What each slot's sequence has in recurrent layers, by graph input name.

    A fresh sequence reads nothing of what its slot held, so that nothing is ever cleared.

    Args:
        shapes: of one sequence, each a multiple of 256 bytes (graph/gated_delta.py).
        slots, replay: see StatePositions.

    Raises:
        DflashError: the device has no room.
    """

    def __init__(
        self, device: Device, shapes: Mapping[str, tuple[int, ...]], slots: int, replay: int
    ) -> None:
        super().__init__(slots, replay)
        self._device = device
        self._sizes = {name: math.prod(shape) * ITEM_BYTES for name, shape in shapes.items()}
        offsets, self.nbytes = lay_out({name: slots * size for name, size in self._sizes.items()})
        base = device.allocate(self.nbytes, f"recurrent states of {slots} sequences")
        self._addresses = {name: base + offset for name, offset in offsets.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def address(self, name: str, slot: int) -> int:
        """Device address of the first byte of `slot` in the named state."""
        return self._addresses[name] + slot * self._sizes[name]

    def move(self, source: int, destination: int) -> None:
        """Copies what a slot has to another, in stream order."""
        for name, size in self._sizes.items():
            self._device.copy(self.address(name, destination), self.address(name, source), size)
        super().move(source, destination)


def allocate_states(bundle: EngineBundle, device: Device) -> DeviceStates | None:
    """Those of the target on `device`; None where it has no recurrent layers.

    Raises:
        DflashError: it has no room.
    """
    shapes, limits = bundle.layout.states(), bundle.limits
    if not shapes:
        return None
    return DeviceStates(device, shapes, limits.max_batch, limits.block_size)

"""States of recurrent layers on the host, float32."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_trt.backends.base import Int64Array
from dflash_trt.backends.onnxruntime.caches import allocate_zeros
from dflash_trt.backends.state_positions import StatePositions


class RecurrentStates(StatePositions):
    """What each slot's sequence has in recurrent layers, by graph input name.

    Args:
        shapes: of one sequence.
        slots, copies, replay: see StatePositions.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], slots: int, copies: int, replay: int
    ) -> None:
        super().__init__(slots, copies, replay)
        held = slots + copies
        self._arrays = allocate_zeros({name: (held, *size) for name, size in shapes.items()})

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __bool__(self) -> bool:
        return bool(self._arrays)

    def begin(self, slots: range, starts: Int64Array) -> None:
        """As StatePositions has it; nothing where the target has no such layers."""
        if self:
            super().begin(slots, starts)

    def shape(self, name: str, batch: int) -> list[int]:
        """Shape of a range of `batch` slots."""
        return [batch, *self._arrays[name].shape[1:]]

    def address(self, name: str, first_slot: int) -> int:
        """Address of the first byte of `first_slot` in the named array."""
        array = self._arrays[name]
        return int(array.ctypes.data) + first_slot * int(array.strides[0])

    def move(self, source: int, destination: int) -> None:
        """Copies what a slot has to another."""
        for array in self._arrays.values():
            array[destination] = array[source]
        super().move(source, destination)

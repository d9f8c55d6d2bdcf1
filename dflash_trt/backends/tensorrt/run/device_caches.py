"""Linear KV caches on a device: [slots, kv heads, M, D], allocated whole."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_trt.errors import DflashError
from dflash_trt.graph.tensors import CacheShape
from dflash_trt.hardware.device import ALIGNMENT, Device, align


class DeviceCaches:
    """The caches of a target and its draft, by graph input name.

    One allocation that never moves, so that addresses can be bound once and captured. Zero bytes
    are zeros of every type, FP8 codes included.

    Raises:
        DflashError: the device has no room, or M is one that leaves slots misaligned.
    """

    def __init__(
        self,
        device: Device,
        shapes: Mapping[str, CacheShape],
        slots: int,
        length: int,
        item_bytes: int,
    ) -> None:
        self._device = device
        self._shapes = shapes
        self._length = length
        self._item_bytes = item_bytes
        sizes = {name: self._slot_bytes(shape) for name, shape in shapes.items()}
        if any(size % ALIGNMENT for size in sizes.values()):
            raise DflashError(
                f"caches of {length} positions leave slots unaligned", fix="build the bundle again"
            )
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += align(slots * size)
        self.nbytes = end
        base = device.allocate(end, f"linear caches ({slots} × {length} positions)")
        # Attention weighs unused positions with zero, and zero times NaN would not be zero.
        device.clear(base, end)
        self._addresses = {name: base + offset for name, offset in offsets.items()}

    def address(self, name: str, slot: int) -> int:
        """Device address of the first byte of `slot` in the named cache."""
        return self._addresses[name] + slot * self._slot_bytes(self._shapes[name])

    def bound_slot(self, first_slot: int) -> int:
        """The first slot of what a call binds."""
        return first_slot

    def move(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` positions of one slot to another, in every cache."""
        for name, shape in self._shapes.items():
            pitch, width = self._row_bytes(shape, length)
            self._device.copy_rows(
                self.address(name, destination),
                self.address(name, source),
                pitch=pitch,
                width=width,
                rows=shape.kv_heads,
            )

    def clear(self, slot: int, length: int) -> None:
        """Zeroes what a slot holds: should a sequence have overflowed, its NaN must not stay."""
        for name, shape in self._shapes.items():
            pitch, width = self._row_bytes(shape, length)
            self._device.clear_rows(
                self.address(name, slot), pitch=pitch, width=width, rows=shape.kv_heads
            )

    def _row_bytes(self, shape: CacheShape, length: int) -> tuple[int, int]:
        """Bytes of one head's whole row, and of its first `length` positions."""
        position = shape.head_dim * self._item_bytes
        return self._length * position, length * position

    def _slot_bytes(self, shape: CacheShape) -> int:
        return shape.kv_heads * self._length * shape.head_dim * self._item_bytes

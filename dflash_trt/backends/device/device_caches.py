"""KV caches, linear or paged, and recurrent states on a device: allocations that never move.

So addresses can be bound once and captured. Zero bytes are zeros of every type, FP8 included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from dflash_trt.backends.base import Int64Array
from dflash_trt.backends.device.passes import PassBundle
from dflash_trt.backends.page_bindings import Int32Array, WindowBindings
from dflash_trt.backends.state_positions import StatePositions
from dflash_trt.core.limits import PagePool
from dflash_trt.graph import bindings as io
from dflash_trt.hardware.device import Device, align


class DeviceCaches:
    """Linear caches [slots, kv heads, M, D] of a target and its draft, by graph input name.

    Raises:
        DflashError: the device has no room.
    """

    def __init__(self, bundle: PassBundle, device: Device) -> None:
        assert bundle.form.cache_length is not None
        self._device, self._length = device, bundle.form.cache_length
        self._shapes, slots = bundle.layout.of(), bundle.limits.max_batch
        self._row_bytes = {
            name: shape.head_dim * bundle.form.cache_item_bytes
            for name, shape in self._shapes.items()
        }
        self._slot_bytes = {
            name: shape.kv_heads * self._length * self._row_bytes[name]
            for name, shape in self._shapes.items()
        }
        offsets, self.nbytes = lay_out({name: slots * n for name, n in self._slot_bytes.items()})
        base = device.allocate(self.nbytes, f"linear caches ({slots} × {self._length} positions)")
        # Attention weighs unused positions with zero, and zero times NaN would not be zero.
        device.clear(base, self.nbytes)
        self._addresses = {name: base + offset for name, offset in offsets.items()}

    def address(self, name: str, slot: int) -> int:
        """Device address of the first byte of `slot` in the named cache."""
        return self._addresses[name] + slot * self._slot_bytes[name]

    def row_places(self, name: str, slot: int, position: int) -> list[int]:
        """Device addresses of what each KV head [D] has of a position."""
        first, heads = self.address(name, slot), range(self._shapes[name].kv_heads)
        return [first + (head * self._length + position) * self._row_bytes[name] for head in heads]

    def bound_slot(self, first_slot: int) -> int:
        """The first slot of what a call binds."""
        return first_slot

    def move(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` positions of one slot to another, in every cache."""
        for name, shape in self._shapes.items():
            row, to = self._row_bytes[name], self.address(name, destination)
            pitch, width, rows = self._length * row, length * row, shape.kv_heads
            from_ = self.address(name, source)
            self._device.copy_rows(to, from_, pitch=pitch, width=width, rows=rows)

    def clear(self, slot: int, length: int, *, begin: int = 0) -> None:
        """Zeroes positions from `begin` on: should any have overflowed, its NaN must not stay."""
        for name, shape in self._shapes.items():
            row = self._row_bytes[name]
            address, pitch = self.address(name, slot) + begin * row, self._length * row
            width = (length - begin) * row
            self._device.clear_rows(address, pitch=pitch, width=width, rows=shape.kv_heads)


class DevicePages(WindowBindings):
    """Pools [pages + 1, page_size, kv heads, D] of a target and its draft, by graph input name.

    A layer has the pages that are its window's in `pool`, which a page table of its own names.

    No call zeroes what an earlier owner left in a page: kernels mask positions outside [first
    visible, length) as they load them.

    Raises:
        DflashError: the device has no room.
    """

    def __init__(self, bundle: PassBundle, device: Device, pool: PagePool) -> None:
        super().__init__(bundle.limits.max_batch, pool)
        self._shapes, self._item_bytes = bundle.layout.of(), bundle.form.cache_item_bytes
        self._windows = {io.page_table_input(window): window for window in pool.kinds}
        page_bytes = {
            name: pool.page_size * fixed.kv_heads * fixed.head_dim * self._item_bytes
            for name, fixed in self._shapes.items()
        }
        pages = {name: pool.kinds[fixed.window] for name, fixed in self._shapes.items()}
        sizes = {name: (pages[name] + 1) * size for name, size in page_bytes.items()}
        offsets, self.nbytes = lay_out(sizes)
        what = f"paged caches ({pool.pages} pages of {pool.page_size} positions)"
        base = device.allocate(self.nbytes, what, fix="build with fewer --kv-pages")
        self._addresses = {name: base + offset for name, offset in offsets.items()}
        # Tables name it where a sequence has no page; only idle rows are written there.
        for name, size in page_bytes.items():
            device.clear(self._addresses[name] + pages[name] * size, size)

    def bind(self, slot: int, page_ids: Sequence[int], window: int | None = None) -> bool:
        """Says which pages of the layers of `window` hold the positions of `slot`.

        Returns whether it has all those still that it had.

        Raises:
            ValueError: a page or a window that the pool does not have.
        """
        bindings = self.of(window)
        before = bindings.count(slot)
        return bindings.bind(slot, page_ids) == before

    def fill(self, name: str, table: Int32Array, slots: Sequence[int], *, first: int = 0) -> None:
        """Writes the pages of `slots` into the page table [B,C] called `name`, from row `first` on.

        Elsewhere stands nobody's page.
        """
        self.of(self._windows[name]).fill(table, slots, first=first)

    def address(self, name: str, slot: int) -> int:
        """Device address of the named pool: the same for every slot."""
        return self._addresses[name]

    def row_places(self, name: str, slot: int, position: int) -> list[int]:
        """Device addresses of what each KV head [D] has of a position of a sequence."""
        shape = self._shapes[name]
        row, heads = shape.head_dim * self._item_bytes, range(shape.kv_heads)
        first = self.of(shape.window).row(slot, position) * len(heads)
        return [self.address(name, slot) + (first + head) * row for head in heads]

    def bound_slot(self, first_slot: int) -> int:
        """The first slot of what a call binds: one binding of whole pools serves every range."""
        return 0


class DeviceStates(StatePositions):
    """What each slot's sequence has in recurrent layers, float32, by graph input name.

    Each is a multiple of 256 bytes (graph/gated_delta.py). A fresh sequence reads nothing of what
    its slot held, so that nothing is ever cleared. `side` [slots + copies] is the side of its rows
    that each slot's next call reads, where they are held twice.

    Raises:
        DflashError: the device has no room.
    """

    def __init__(self, bundle: PassBundle, device: Device) -> None:
        shapes, limits = bundle.layout.states(), bundle.limits
        super().__init__(shapes, limits.max_batch, limits.state_copies, limits.block_size)
        self._device, self._has_sides = device, bundle.layout.has_sides
        held = limits.max_batch + limits.state_copies
        self.side = np.zeros(held, np.int64)
        item = np.dtype(np.float32).itemsize
        self._sizes = {name: math.prod(shape) * item for name, shape in shapes.items()}
        offsets, self.nbytes = lay_out({name: held * size for name, size in self._sizes.items()})
        what = f"recurrent states of {held} sequences"
        base = device.allocate(self.nbytes, what) if shapes else 0
        self._addresses = {name: base + offset for name, offset in offsets.items()}

    def address(self, name: str, slot: int) -> int:
        """Device address of the first byte of `slot` in the named state."""
        return self._addresses[name] + slot * self._sizes[name]

    def places(self) -> dict[str, Int64Array]:
        """What a call is told of its slots, by the graphs' inputs."""
        if not self:
            return {}
        told = {io.STATE_START: self.state_start, io.ROWS_END: self.rows_end}
        return told | {io.ROWS_SIDE: self.side} if self._has_sides else told

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


def lay_out(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Offsets of aligned blocks of these sizes one after another, and the bytes of all."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += align(size)
    return offsets, end

"""KV caches on a device, linear or paged: one allocation that never moves.

So addresses can be bound once and captured. Zero bytes are zeros of every type, FP8 included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_trt.backends.page_bindings import Int32Array, WindowBindings
from dflash_trt.backends.tensorrt.run.engines import EngineBundle
from dflash_trt.core.limits import PagePool
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import page_table_input
from dflash_trt.graph.tensors import CacheShape
from dflash_trt.hardware.device import ALIGNMENT, Device, align


class DeviceCaches:
    """Linear caches [slots, kv heads, M, D] of a target and its draft, by graph input name.

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
        offsets, self.nbytes = lay_out({name: slots * size for name, size in sizes.items()})
        base = device.allocate(self.nbytes, f"linear caches ({slots} × {length} positions)")
        # Attention weighs unused positions with zero, and zero times NaN would not be zero.
        device.clear(base, self.nbytes)
        self._addresses = {name: base + offset for name, offset in offsets.items()}

    def address(self, name: str, slot: int) -> int:
        """Device address of the first byte of `slot` in the named cache."""
        return self._addresses[name] + slot * self._slot_bytes(self._shapes[name])

    def row_places(self, name: str, slot: int, position: int) -> list[int]:
        """Device addresses of what each KV head [D] has of a position."""
        row = self._shapes[name].head_dim * self._item_bytes
        first, heads = self.address(name, slot), range(self._shapes[name].kv_heads)
        return [first + (head * self._length + position) * row for head in heads]

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

    def clear(self, slot: int, length: int, *, begin: int = 0) -> None:
        """Zeroes positions from `begin` on: should any have overflowed, its NaN must not stay."""
        for name, shape in self._shapes.items():
            _, skipped = self._row_bytes(shape, begin)
            pitch, width = self._row_bytes(shape, length - begin)
            address = self.address(name, slot) + skipped
            self._device.clear_rows(address, pitch=pitch, width=width, rows=shape.kv_heads)

    def _row_bytes(self, shape: CacheShape, length: int) -> tuple[int, int]:
        """Bytes of one head's whole row, and of its first `length` positions."""
        position = shape.head_dim * self._item_bytes
        return self._length * position, length * position

    def _slot_bytes(self, shape: CacheShape) -> int:
        return shape.kv_heads * self._length * shape.head_dim * self._item_bytes


class DevicePages:
    """Pools [pages + 1, page_size, kv heads, D] of a target and its draft, by graph input name.

    A layer has the pages that are its window's in `pool`, which a page table of its own names.

    No call zeroes what an earlier owner left in a page: kernels mask positions outside [first
    visible, length) as they load them.

    Raises:
        DflashError: the device has no room.
    """

    def __init__(
        self,
        device: Device,
        shapes: Mapping[str, CacheShape],
        slots: int,
        pool: PagePool,
        *,
        item_bytes: int,
    ) -> None:
        self._shapes = shapes
        self._item_bytes = item_bytes
        self._bindings = WindowBindings(slots, pool)
        self._windows = {page_table_input(window): window for window in pool.kinds}
        page_bytes = {
            name: pool.page_size * fixed.kv_heads * fixed.head_dim * item_bytes
            for name, fixed in shapes.items()
        }
        pages = {name: pool.kinds[fixed.window] for name, fixed in shapes.items()}
        sizes = {name: (pages[name] + 1) * size for name, size in page_bytes.items()}
        offsets, self.nbytes = lay_out(sizes)
        base = device.allocate(
            self.nbytes,
            f"paged caches ({pool.pages} pages of {pool.page_size} positions)",
            fix="build with fewer --kv-pages",
        )
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
        bindings = self._bindings[window]
        before = bindings.count(slot)
        return bindings.bind(slot, page_ids) == before

    def check(self, ends: Mapping[int, int], rows: int) -> None:
        """Raises ValueError unless slots have the pages that `rows` rows each write and see.

        The rows end at `ends`, by slot.
        """
        self._bindings.check(ends, rows)

    def fill(self, name: str, table: Int32Array, slots: Sequence[int], *, first: int = 0) -> None:
        """Writes the pages of `slots` into the page table [B,C] called `name`, from row `first` on.

        Elsewhere stands nobody's page.
        """
        self._bindings[self._windows[name]].fill(table, slots, first=first)

    def move(self, source: int, destination: int, length: int) -> None:
        """Gives `destination` the pages of `source`; no row is copied."""
        self._bindings.move(source, destination)

    def clear(self, slot: int, length: int) -> None:
        """Forgets the pages of a slot; their rows stay, for whoever shares them."""
        self._bindings.clear(slot)

    def address(self, name: str, slot: int) -> int:
        """Device address of the named pool: the same for every slot."""
        return self._addresses[name]

    def row_places(self, name: str, slot: int, position: int) -> list[int]:
        """Device addresses of what each KV head [D] has of a position of a sequence."""
        shape = self._shapes[name]
        row, heads = shape.head_dim * self._item_bytes, range(shape.kv_heads)
        first = self._bindings[shape.window].row(slot, position) * len(heads)
        return [self.address(name, slot) + (first + head) * row for head in heads]

    def bound_slot(self, first_slot: int) -> int:
        """The first slot of what a call binds: one binding of whole pools serves every range."""
        return 0


def allocate_caches(bundle: EngineBundle, device: Device) -> DeviceCaches | DevicePages:
    """The caches of target and draft on `device`.

    Raises:
        DflashError: it has no room.
    """
    shapes, form, limits = bundle.layout.of(), bundle.form, bundle.limits
    slots, pool, item_bytes = limits.max_batch, limits.page_pool, form.cache_item_bytes
    assert form.cache_length is not None
    if pool is None:
        return DeviceCaches(device, shapes, slots, form.cache_length, item_bytes)
    return DevicePages(device, shapes, slots, pool, item_bytes=item_bytes)


def lay_out(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Offsets of aligned blocks of these sizes one after another, and the bytes of all."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += align(size)
    return offsets, end

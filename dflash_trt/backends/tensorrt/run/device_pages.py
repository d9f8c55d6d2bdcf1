"""Paged KV caches on a device: pools [pages + 1, page_size, kv heads, D], one per cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from dflash_trt.backends.page_bindings import Int32Array, PageBindings
from dflash_trt.core.limits import PagePool
from dflash_trt.graph.tensors import CacheShape
from dflash_trt.hardware.device import Device, align


class DevicePages:
    """The pools of a target and its draft, by graph input name, and who lives on which page.

    Args:
        device: where the pools are.
        shapes: of one layer's K or V, by graph input name.
        slots: sequences that may have pages.
        pool: pages of every cache; one more is nobody's.
        columns: of a page table: the pages of the longest sequence.
        item_bytes: of an element.

    `table_bytes` are those of the largest call's page table.

    One allocation that never moves. No call zeroes a page, or what an earlier owner left behind
    a sequence's rows: the kernels that read pools take positions from [first visible, length)
    alone and put zeros in place of others before they multiply (block_attention masks its loads),
    where the host's graphs multiply whole pages by weights of zero.

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
        columns: int,
        item_bytes: int,
    ) -> None:
        self._columns = columns
        self.table_bytes = slots * columns * np.dtype(np.int32).itemsize
        self._bindings = PageBindings(slots, pool)
        page_bytes = {
            name: pool.page_size * fixed.kv_heads * fixed.head_dim * item_bytes
            for name, fixed in shapes.items()
        }
        ends = list(accumulate(align((pool.pages + 1) * size) for size in page_bytes.values()))
        self.nbytes = ends[-1]
        base = device.allocate(
            self.nbytes,
            f"paged caches ({pool.pages} pages of {pool.page_size} positions)",
            fix="build with fewer --kv-pages",
        )
        offsets = zip(page_bytes, [0, *ends[:-1]], strict=True)
        self._addresses = {name: base + offset for name, offset in offsets}
        # Tables name it where a sequence has no page; nobody writes there.
        for name, size in page_bytes.items():
            device.clear(self._addresses[name] + pool.pages * size, size)

    def address(self, name: str, slot: int) -> int:
        """Device address of the named pool: the same for every slot."""
        return self._addresses[name]

    def bound_slot(self, first_slot: int) -> int:
        """The first slot of what a call binds: one binding of whole pools serves every range."""
        return 0

    def bind_pages(self, slot: int, page_ids: Sequence[int]) -> bool:
        """Says which pages hold the positions of `slot`, in order; whether those before stay.

        Calls that are enqueued have their own table: what they write stays where it was bound.

        Raises:
            ValueError: a page that the pool does not have.
        """
        before = self._bindings.count(slot)
        return self._bindings.bind(slot, page_ids) == before

    def check(self, ends: Mapping[int, int]) -> None:
        """Raises ValueError when a slot's pages end before a call's rows do, at `ends` by slot."""
        self._bindings.check(ends)

    def fill(self, table: Int32Array, first_slot: int) -> None:
        """Writes a call's page table [B,C]: all pages of its slots, so that the next step's fit."""
        self._bindings.fill(table, first_slot, [self._columns] * len(table))

    def move(self, source: int, destination: int, length: int) -> None:
        """Gives `destination` the pages of `source`; no row is copied."""
        self._bindings.move(source, destination)

    def clear(self, slot: int, length: int) -> None:
        """Forgets the pages of a slot; their rows stay, for whoever shares them."""
        self._bindings.clear(slot)

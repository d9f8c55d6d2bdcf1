"""Paged KV caches on the host: pools [pages + 1, page_size, kv heads, D] float32, one per cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_trt.backends.onnxruntime.caches import allocate_zeros, round_length
from dflash_trt.backends.page_bindings import Int32Array, PageBindings
from dflash_trt.core.limits import PagePool
from dflash_trt.graph.tensors import CacheShape


class PagedCaches:
    """The pools of a target and its draft, by graph input name, and who lives on which page.

    Pages are shared by all layers of both models: page p holds the same positions in every pool.
    Memory is touched page by page, as rows are written. The last page of every pool is nobody's
    and stays zero: columns of a page table that hold nothing point there.
    """

    generation = 0  # pools never move

    def __init__(self, shapes: Mapping[str, CacheShape], slots: int, pool: PagePool) -> None:
        self._pool = pool
        self._shapes = {
            name: (pool.pages + 1, pool.page_size, fixed.kv_heads, fixed.head_dim)
            for name, fixed in shapes.items()
        }
        self._pools = allocate_zeros(self._shapes)
        self._bindings = PageBindings(slots, pool)
        self._reached = [0] * slots  # where rows have been written up to, of what is bound

    def bind_pages(self, slot: int, page_ids: Sequence[int]) -> None:
        """Says which pages hold the positions of `slot`, in order.

        Raises:
            ValueError: a page that the pool does not have.
        """
        kept = self._bindings.bind(slot, page_ids)
        self._reached[slot] = min(self._reached[slot], kept * self._pool.page_size)

    def enter(self, ends: Mapping[int, int], rows: int) -> int:
        """Gets ready for `rows` rows that end at `ends`, by slot; returns the table's columns.

        A page that the call begins is zeroed behind the call's rows: attention multiplies rows
        past a length by exactly zero, and what an earlier owner left there may be NaN. A page
        begun before has the sequence's own rows there.

        Raises:
            ValueError: a slot's pages end before its rows do; nothing has been touched.
        """
        self._bindings.check(ends)
        size = self._pool.page_size
        for slot, end in ends.items():
            column, used = divmod(end, size)
            if used and column * size >= max(end - rows, self._reached[slot]):
                page = self._bindings.page(slot, column)
                for pool in self._pools.values():
                    pool[page, used:] = 0
            self._reached[slot] = max(self._reached[slot], end)
        return self._pool.cover(round_length(max(ends.values())))

    def fill(self, table: Int32Array, ends: Sequence[int], first_slot: int) -> None:
        """Writes a call's page table [B,C]; columns past what a sequence holds name nobody's.

        Those that it has pages for, but no rows yet, as well: an earlier owner's may be NaN.
        """
        self._bindings.fill(table, first_slot, [self._pool.cover(end) for end in ends])

    def address(self, name: str, first_slot: int) -> int:
        """Address of the named pool: the same for every slot."""
        return int(self._pools[name].ctypes.data)

    def shape(self, name: str, batch: int) -> list[int]:
        """Shape [pages + 1, page_size, kv heads, D] of the named pool, whatever the batch."""
        return list(self._shapes[name])

    def move(self, source: int, destination: int, length: int) -> None:
        """Gives `destination` the pages of `source`; no row is copied."""
        self._bindings.move(source, destination)
        self._reached[destination] = self._reached[source]

    def clear(self, slot: int) -> None:
        """Forgets the pages of a slot; their rows stay, for whoever shares them."""
        self._bindings.clear(slot)
        self._reached[slot] = 0

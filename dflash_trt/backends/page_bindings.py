"""Which pages of a pool hold the positions of each slot, wherever the pool's memory is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dflash_trt.core.limits import PagePool

Int32Array = npt.NDArray[np.int32]


class PageBindings:
    """The pages of every slot, in order of position; page `pool.pages` is nobody's."""

    def __init__(self, slots: int, pool: PagePool) -> None:
        self._pool = pool
        self._bound: list[Int32Array] = [np.empty(0, np.int32)] * slots

    def bind(self, slot: int, page_ids: Sequence[int]) -> int:
        """Says which pages hold the positions of `slot`; returns how many at the head stay.

        Raises:
            ValueError: a page that the pool does not have.
        """
        if not all(0 <= page < self._pool.pages for page in page_ids):
            raise ValueError(f"pages {list(page_ids)} are not within {self._pool.pages}")
        before, after = self._bound[slot], np.array(page_ids, np.int32)
        common = min(len(before), len(after))
        changed = np.flatnonzero(before[:common] != after[:common])
        self._bound[slot] = after
        return int(changed[0]) if len(changed) else common

    def page(self, slot: int, column: int) -> int:
        """The page that holds positions from column · page size of `slot` on."""
        return int(self._bound[slot][column])

    def count(self, slot: int) -> int:
        """How many pages `slot` has."""
        return len(self._bound[slot])

    def check(self, ends: Mapping[int, int]) -> None:
        """Raises ValueError when a slot's pages end before its rows do, at `ends` by slot."""
        for slot, end in ends.items():
            held = self.count(slot) * self._pool.page_size
            if end > held:
                raise ValueError(f"slot {slot} has pages for {held} positions, not {end}")

    def fill(self, table: Int32Array, first_slot: int, columns: Sequence[int]) -> None:
        """Writes a page table [B,C] of slots from `first_slot` on.

        Each sequence's first `columns` pages, and nobody's behind them.
        """
        table.fill(self._pool.pages)
        for row, used in enumerate(columns):
            pages = self._bound[first_slot + row][:used]
            table[row, : len(pages)] = pages

    def move(self, source: int, destination: int) -> None:
        """Gives `destination` the pages of `source`."""
        self._bound[destination] = self._bound[source]

    def clear(self, slot: int) -> None:
        """Forgets the pages of a slot."""
        self._bound[slot] = np.empty(0, np.int32)

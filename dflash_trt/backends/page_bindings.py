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

    def count(self, slot: int) -> int:
        """How many pages `slot` has."""
        return len(self._bound[slot])

    def row(self, slot: int, position: int) -> int:
        """Which row of the whole pool holds a position of `slot`."""
        column, place = divmod(position, self._pool.page_size)
        return int(self._bound[slot][column]) * self._pool.page_size + place

    def check(self, ends: Mapping[int, int]) -> None:
        """Raises ValueError when a slot's pages end before its rows do, at `ends` by slot."""
        for slot, end in ends.items():
            held = self.count(slot) * self._pool.page_size
            if end > held:
                raise ValueError(f"slot {slot} has pages for {held} positions, not {end}")

    def fill(
        self, table: Int32Array, slots: Sequence[int], ends: Mapping[int, int] | None = None
    ) -> None:
        """Writes `slots` into the first rows of a page table [B,C], nobody's page elsewhere.

        Of each slot the pages up to its end, or all of them.
        """
        table.fill(self._pool.pages)
        for row, slot in enumerate(slots):
            used = table.shape[1] if ends is None else self._pool.cover(ends[slot])
            pages = self._bound[slot][:used]
            table[row, : len(pages)] = pages

    def move(self, source: int, destination: int, length: int) -> None:
        """Gives `destination` the pages of `source`; no row is copied."""
        self._bound[destination] = self._bound[source]

    def clear(self, slot: int, length: int = 0) -> None:
        """Forgets the pages of a slot; their rows stay, for whoever shares them."""
        self._bound[slot] = np.empty(0, np.int32)

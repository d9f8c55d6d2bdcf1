"""Which pages of a pool hold the positions of each slot, wherever the pool's memory is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dflash_trt.core.limits import PagePool

Int32Array = npt.NDArray[np.int32]

HANDED_BACK = -1
"""In place of a page whose positions a sequence sees no more."""


class PageBindings:
    """The pages of every slot, in order of position; page `pool.pages` is nobody's.

    Args:
        window: of the layers whose pages they are, pages of `pool` that only such layers have.
    """

    def __init__(self, slots: int, pool: PagePool, window: int | None = None) -> None:
        self._pool = replace(pool, pages=pool.kinds[window])
        self._window = window
        self._bound: list[Int32Array] = [np.empty(0, np.int32)] * slots

    def bind(self, slot: int, page_ids: Sequence[int]) -> int:
        """Says which pages hold the positions of `slot`; returns how many at the head stay.

        Those that are handed back count as if they stayed.

        Raises:
            ValueError: a page that the pool does not have.
        """
        lowest = 0 if self._window is None else HANDED_BACK
        if not all(lowest <= page < self._pool.pages for page in page_ids):
            raise ValueError(f"pages {list(page_ids)} are not within {self._pool.pages}")
        before, after = self._bound[slot], np.array(page_ids, np.int32)
        common = min(len(before), len(after))
        head = after[:common]
        changed = np.flatnonzero((before[:common] != head) & (head != HANDED_BACK))
        self._bound[slot] = after
        return int(changed[0]) if len(changed) else common

    def count(self, slot: int) -> int:
        """How many pages `slot` has."""
        return len(self._bound[slot])

    def row(self, slot: int, position: int) -> int:
        """Which row of the whole pool holds a position of `slot`."""
        column, place = divmod(position, self._pool.page_size)
        return int(self._bound[slot][column]) * self._pool.page_size + place

    def check(self, ends: Mapping[int, int], rows: int = 1) -> None:
        """As WindowBindings has it."""
        for slot, end in ends.items():
            held = self.count(slot) * self._pool.page_size
            if end > held:
                raise ValueError(f"slot {slot} has pages for {held} positions, not {end}")
            if self._window is None:
                continue
            first = self._pool.first_seen(self._window, end - rows)
            seen = self._bound[slot][first : self._pool.cover(end)]
            if (seen == HANDED_BACK).any():
                raise ValueError(f"slot {slot} has handed back what rows from {end - rows} on see")

    def fill(
        self,
        table: Int32Array,
        slots: Sequence[int],
        ends: Mapping[int, int] | None = None,
        *,
        first: int = 0,
    ) -> None:
        """Writes `slots` into a page table [B,C] from row `first` on, nobody's page elsewhere.

        Of each slot the pages up to its end, or all of them.
        """
        table.fill(self._pool.pages)
        for row, slot in enumerate(slots, first):
            used = table.shape[1] if ends is None else self._pool.cover(ends[slot])
            pages = self._bound[slot][:used]
            table[row, : len(pages)] = pages
        table[table == HANDED_BACK] = self._pool.pages

    def move(self, source: int, destination: int) -> None:
        self._bound[destination] = self._bound[source]

    def clear(self, slot: int) -> None:
        self._bound[slot] = np.empty(0, np.int32)


class WindowBindings:
    """The pages of every slot of each kind of a pool, by the window of the layers they are for."""

    def __init__(self, slots: int, pool: PagePool) -> None:
        self._kinds = {window: PageBindings(slots, pool, window) for window in pool.kinds}

    def of(self, window: int | None) -> PageBindings:
        """The pages of layers of `window`; ValueError where those have none of their own."""
        if window not in self._kinds:
            raise ValueError(f"layers with a window of {window} have no pages of their own")
        return self._kinds[window]

    def check(self, ends: Mapping[int, int], rows: int) -> None:
        """Raises ValueError unless slots have all pages that `rows` rows each write and see.

        The rows end at `ends`, by slot.
        """
        for bindings in self._kinds.values():
            bindings.check(ends, rows)

    def move(self, source: int, destination: int, length: int = 0) -> None:
        """Gives `destination` the pages of `source`; no row is copied, whatever the `length`."""
        for bindings in self._kinds.values():
            bindings.move(source, destination)

    def clear(self, slot: int, length: int = 0) -> None:
        """Forgets the pages of a slot; their rows stay, for whoever shares them."""
        for bindings in self._kinds.values():
            bindings.clear(slot)

"""The fake executor with paged caches: a page's rows are what was last written there.

The contract it believes: a slot reads and writes through the pages that it was bound to last, in
order; none twice in a slot; a move takes the binding along and copies no row. Of layers with a
window, a call has the pages that its rows see, and they hold what the other layers' do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dflash_trt.backends.base import Int64Array
from dflash_trt.backends.page_bindings import HANDED_BACK
from dflash_trt.core.limits import PagePool
from tests.standins.executor import NEVER_WRITTEN, FakeExecutor


class PagedFakeExecutor(FakeExecutor):
    """Holds the runtime to the contract of a paged executor; see `FakeExecutor` for the rest."""

    def __init__(self, pool: PagePool, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self._limits = replace(self._limits, page_pool=pool)
        self._size = pool.page_size
        shapes = {window: (pages, pool.page_size) for window, pages in pool.kinds.items()}
        self._page_ids = {
            window: np.full(shape, NEVER_WRITTEN, np.int64) for window, shape in shapes.items()
        }
        self._page_injected = {window: np.zeros(shape, bool) for window, shape in shapes.items()}
        slots = self._limits.max_batch
        self._bound: dict[int | None, list[list[int]]] = {
            window: [[] for _ in range(slots)] for window in pool.kinds
        }

    def bind_pages(self, slot: int, page_ids: Sequence[int], window: int | None = None) -> None:
        assert window is not None or HANDED_BACK not in page_ids
        held = [page for page in page_ids if page != HANDED_BACK]
        assert len(set(held)) == len(held)
        self._bound[window][slot] = list(page_ids)

    def held(self, slot: int) -> int:
        """Positions that a slot has pages for."""
        return len(self._bound[None][slot]) * self._size

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self._note("move", destination, 1, length)
        assert source != destination and length <= self.held(source)
        for bound in self._bound.values():
            bound[destination], bound[source] = bound[source], []

    def release_slots(self, first_free: int) -> None:
        for bound in self._bound.values():
            for slot in range(first_free, len(bound)):
                bound[slot] = []

    def poison(self, pages: Iterable[int], window: int | None = None) -> None:
        """Whoever still reads one of these pages reads nothing."""
        for page in pages:
            self._page_ids[window][page] = NEVER_WRITTEN
            self._page_injected[window][page] = False

    def _write(self, slot: int, start: int, token_ids: Int64Array, injects: bool) -> None:
        end = start + len(token_ids)
        for window, bound in self._bound.items():
            assert end <= len(bound[slot]) * self._size
            for position, token_id in enumerate(token_ids.tolist(), start=start):
                page, place = bound[slot][position // self._size], position % self._size
                assert page != HANDED_BACK
                self._page_ids[window][page, place] = token_id
                self._page_injected[window][page, place] = injects
            if window is not None:
                seen = slice(max(0, start - window + 1), end)
                rows = self._rows(self._page_ids[window], window, slot, seen)
                assert rows == list(self._cached_ids(slot, end))[seen], f"slot {slot}: {window}"

    def _is_injected(self, slot: int, length: int) -> bool:
        return all(
            all(self._rows(pages, window, slot, slice(max(0, length - (window or length)), length)))
            for window, pages in self._page_injected.items()
        )

    def _cached_ids(self, slot: int, length: int) -> tuple[int, ...]:
        return tuple(self._rows(self._page_ids[None], None, slot, slice(length)))

    def _rows(
        self, pages: np.ndarray, window: int | None, slot: int, positions: slice
    ) -> list[Any]:
        """What pages hold of these positions of a slot; HANDED_BACK where it has none."""
        bound = self._bound[window][slot]
        places = (divmod(position, self._size) for position in range(positions.stop)[positions])
        return [
            HANDED_BACK if bound[column] == HANDED_BACK else pages[bound[column], place].item()
            for column, place in places
        ]

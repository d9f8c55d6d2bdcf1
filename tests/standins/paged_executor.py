"""The fake executor with paged caches: a page's rows are what was last written there.

The contract it believes: a slot reads and writes through the pages that it was bound to last, in
order; none twice in a slot; a move takes the binding along and copies no row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from dflash_trt.backends.base import Int64Array
from dflash_trt.core.limits import PagePool
from tests.standins.executor import NEVER_WRITTEN, FakeExecutor


class PagedFakeExecutor(FakeExecutor):
    """Holds the runtime to the contract of a paged executor; see `FakeExecutor` for the rest."""

    def __init__(self, pool: PagePool, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self._limits = replace(self._limits, page_pool=pool)
        self._size = pool.page_size
        shape = (pool.pages, pool.page_size)
        self._page_ids = np.full(shape, NEVER_WRITTEN, np.int64)
        self._page_injected = np.zeros(shape, bool)
        self._bound: list[list[int]] = [[] for _ in range(self._limits.max_batch)]

    def bind_pages(self, slot: int, page_ids: Sequence[int]) -> None:
        assert len(set(page_ids)) == len(page_ids)
        self._bound[slot] = list(page_ids)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self._note("move", destination, 1, length)
        assert source != destination and length <= len(self._bound[source]) * self._size
        self._bound[destination], self._bound[source] = self._bound[source], []

    def release_slots(self, first_free: int) -> None:
        for slot in range(first_free, len(self._bound)):
            self._bound[slot] = []

    def poison(self, pages: Iterable[int]) -> None:
        """Whoever still reads one of these pages reads nothing."""
        for page in pages:
            self._page_ids[page] = NEVER_WRITTEN
            self._page_injected[page] = False

    def _write(self, slot: int, start: int, token_ids: Int64Array, injects: bool) -> None:
        assert start + len(token_ids) <= len(self._bound[slot]) * self._size
        for position, token_id in enumerate(token_ids.tolist(), start=start):
            page, place = self._bound[slot][position // self._size], position % self._size
            self._page_ids[page, place] = token_id
            self._page_injected[page, place] = injects

    def _is_injected(self, slot: int, length: int) -> bool:
        return bool(self._page_injected[self._bound[slot]].reshape(-1)[:length].all())

    def _cached_ids(self, slot: int, length: int) -> tuple[int, ...]:
        return tuple(self._page_ids[self._bound[slot]].reshape(-1)[:length].tolist())

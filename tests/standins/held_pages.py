"""What the kernels of paged caches read and write."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class HeldPages:
    """One call's rows in pools, which the graph's bodies gather whole.

    block_attention reads no row that its sequence does not hold, or that a `window` does not see,
    and kv_cache_update writes a call's rows alone. Rows that are not held are zeros for the body:
    it multiplies them by zero. Idle rows may lie on `nobody`, the last page of every pool, and
    leave NaN there: sequences that have no other page, and rows behind the `own` [B] of a sequence,
    those up to the last logits wanted.
    """

    def __init__(
        self,
        nobody: int,
        size: int,
        table: np.ndarray,
        starts: np.ndarray,
        rows: int,
        own: Sequence[int],
        window: int | None = None,
    ) -> None:
        self._nobody = nobody
        assert table.min() >= 0 and table.max() <= nobody
        self._held, self._written = [], []
        for pages, start, count in zip(table, starts.tolist(), own, strict=True):
            positions = np.arange(start + rows)
            places = np.stack([pages[positions // size], positions % size])
            is_idle = (pages == nobody).all() and start == 0
            held = 0 if is_idle else start + count
            first = 0 if window is None else max(0, start - window + 1)
            assert (places[0, first:held] < nobody).all(), "a row on the page that is nobody's"
            self._held.append(places[:, first:start])
            self._written.append(places[:, start:])

    def mask(self, pool: np.ndarray) -> np.ndarray:
        seen = np.zeros_like(pool)
        for page, place in self._held:
            seen[page, place] = pool[page, place]
        return seen

    def write(self, memory: np.ndarray, pool: np.ndarray) -> None:
        for page, place in self._written:
            memory[page, place] = pool[page, place]
            memory[self._nobody, place[page == self._nobody]] = np.nan

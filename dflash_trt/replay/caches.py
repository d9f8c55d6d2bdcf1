"""HostCaches: KV caches of several sequences, whose rows can be read and written by position."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dflash_trt.backends.base import FloatArray
from dflash_trt.backends.onnxruntime.caches import allocate_zeros, round_length
from dflash_trt.graph.tensors import CacheShape

ContextRows = dict[str, FloatArray]
"""What each cache holds of the first n positions of one sequence, [n, kv heads, D]."""


class HostCaches:
    """Caches by graph input name, linear or in pages, as the bundle's graphs want them.

    Each slot has the pages for `positions` positions for itself.
    """

    def __init__(
        self,
        shapes: Mapping[str, CacheShape],
        slots: int,
        positions: int,
        page_size: int | None = None,
    ) -> None:
        self.length = round_length(positions)
        self._page_size = page_size
        self._shapes = shapes
        if page_size is None:
            self._columns = 0
            sizes = {
                name: (slots, one.kv_heads, self.length, one.head_dim)
                for name, one in shapes.items()
            }
            self._arrays = allocate_zeros(sizes)
            self._rows = {name: one.transpose(0, 2, 1, 3) for name, one in self._arrays.items()}
        else:
            self._columns = -(-self.length // page_size)
            self.length = self._columns * page_size
            pools = {
                name: (slots * self._columns + 1, page_size, one.kv_heads, one.head_dim)
                for name, one in shapes.items()
            }
            self._arrays = allocate_zeros(pools)
            self._rows = {
                name: pool[:-1].reshape(slots, self.length, *pool.shape[2:])
                for name, pool in self._arrays.items()
            }

    def place(self, name: str, first: int, count: int) -> tuple[list[int], int]:
        """Shape and address that a graph is given for the slots first … first + count - 1."""
        array = self._arrays[name]
        address = int(array.ctypes.data)
        if self._page_size is not None:
            return list(array.shape), address
        return [count, *array.shape[1:]], address + first * int(array.strides[0])

    def page_table(self, first: int, count: int) -> npt.NDArray[np.int32]:
        """int32 [count,C]: the pages of each slot."""
        start = first * self._columns
        pages = np.arange(start, start + count * self._columns, dtype=np.int32)
        return pages.reshape(count, self._columns)

    def read(self, slot: int, length: int) -> ContextRows:
        """A copy of the first `length` positions of a slot."""
        return {name: rows[slot, :length].copy() for name, rows in self._rows.items()}

    def fill(self, slot: int, context: ContextRows) -> None:
        """Gives a slot to a sequence: its context, and zeros behind."""
        for name, rows in self._rows.items():
            length = len(context[name])
            rows[slot, :length] = context[name]
            rows[slot, length:] = 0  # an overflow of the last one must not reach this one

    def restore(self, slot: int, context: ContextRows, start: int, end: int) -> None:
        """Puts back the positions start … end - 1 of a slot, as far as the context reaches."""
        for name, rows in self._rows.items():
            kept = context[name][start:end]
            rows[slot, start : start + len(kept)] = kept

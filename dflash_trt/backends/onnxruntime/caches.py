"""Caches on the host, float32: linear ones, pools of pages, states of recurrent layers."""

from __future__ import annotations

import errno
import math
import mmap
import os
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from dflash_trt.backends.base import FloatArray
from dflash_trt.backends.page_bindings import WindowBindings
from dflash_trt.backends.state_positions import StatePositions
from dflash_trt.core.limits import PagePool
from dflash_trt.graph.tensors import CacheShape

# Attention costs what M is, so M starts small and doubles. Logits do not depend on it, bit for bit,
# while it is a multiple of 64 (vectorised sums walk rows in the same lanes) and at least 128
# (below, matrix products with large heads take another path).
LENGTH_STEP = 64
FIRST_LENGTH = 128
# A long prompt is often followed by another; moving all caches takes as long as several steps.
SPARE_CALLS = 64


class LinearCaches:
    """The caches [slots, kv heads, M, D] of a target and its draft, by graph input name.

    M follows the tokens held. All share it, from FIRST_LENGTH to `max_seq_len` rounded up.
    """

    def __init__(self, shapes: dict[str, CacheShape], slots: int, max_seq_len: int) -> None:
        self._shapes = shapes
        self._slots = slots
        self._limit = round_length(max_seq_len)
        self.length, self._spare_calls = FIRST_LENGTH, 0
        self._arrays = self._allocate()

    def fit(self, held: Sequence[int]) -> bool:
        """Makes M fit the positions `held` per slot: doubles, or halves where a quarter would do.

        That must be so for some calls. Returns whether the arrays moved: all addresses are stale.

        Raises:
            ValueError: a slot would hold more than max_seq_len allows.
        """
        longest, length = max(held), self.length
        if longest > self._limit:
            raise ValueError(f"{longest} positions do not fit caches of {self._limit}")
        while length < longest:
            length = min(length * 2, self._limit)
        self._spare_calls = self._spare_calls + 1 if length >= 4 * longest else 0
        while self._spare_calls > SPARE_CALLS and FIRST_LENGTH < length >= 4 * longest:
            length = _round_up(length // 2)
        if length == self.length:
            return False
        kept = min(length, self.length)
        self.length = length
        occupied = [slot for slot, count in enumerate(held) if count]
        new = self._allocate()
        for name, old in self._arrays.items():
            for slot in occupied:
                new[name][slot, :, :kept] = old[slot, :, :kept]
        self._arrays = new
        return True

    def address(self, name: str, first_slot: int) -> int:
        """Address of the first byte of `first_slot` in the named cache."""
        array = self._arrays[name]
        return int(array.ctypes.data) + first_slot * int(array.strides[0])

    def read_row(self, name: str, slot: int, position: int) -> FloatArray:
        """What the named cache holds of a position, [kv heads, D]."""
        return self._arrays[name][slot, :, position]

    def largest(self, name: str) -> float:
        """The largest magnitude in the named cache; what was never written is zero."""
        array = self._arrays[name]
        return float(max(array.max(), -array.min()))

    def shape(self, name: str, batch: int) -> list[int]:
        """Shape [batch, kv heads, M, D] of a range of `batch` slots."""
        fixed = self._shapes[name]
        return [batch, fixed.kv_heads, self.length, fixed.head_dim]

    def move(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` positions of one slot to another, in every cache."""
        for array in self._arrays.values():
            array[destination, :, :length] = array[source, :, :length]

    def clear(self, slot: int) -> None:
        """Zeroes a slot: should a sequence have overflowed, its NaN must not reach the next."""
        for array in self._arrays.values():
            array[slot] = 0

    def _allocate(self) -> dict[str, FloatArray]:
        """Arrays of the current length; zeros, as attention gives unused positions weight zero."""
        return allocate_zeros(
            {name: (self._slots, *self.shape(name, 1)[1:]) for name in self._shapes}
        )


class PagedCaches(WindowBindings):
    """The pools [pages + 1, page_size, kv heads, D] of a target and its draft, by graph input name.

    Page p holds the same positions in every pool of layers of a window, and in every pool of those
    without. Memory is touched page by page, as rows are written. The last page of every pool is
    nobody's and stays zero.
    """

    def __init__(self, shapes: Mapping[str, CacheShape], slots: int, pool: PagePool) -> None:
        super().__init__(slots, pool)
        self._pool = pool
        self._windows = {name: fixed.window for name, fixed in shapes.items()}
        self._pools = allocate_zeros(
            {
                name: (pool.kinds[fixed.window] + 1, pool.page_size, fixed.kv_heads, fixed.head_dim)
                for name, fixed in shapes.items()
            }
        )
        self._reached = [0] * slots  # where rows have been written up to, of what is bound

    def bind(self, slot: int, page_ids: Sequence[int], window: int | None = None) -> None:
        """Says which pages of the layers of `window` hold the positions of `slot`.

        Raises:
            ValueError: a page or a window that the pool does not have.
        """
        kept = self.of(window).bind(slot, page_ids)
        self._reached[slot] = min(self._reached[slot], kept * self._pool.page_size)

    def enter(self, ends: Mapping[int, int], rows: int) -> int:
        """Gets ready for `rows` rows that end at `ends`, by slot; returns the table's columns.

        A page that the call begins is zeroed behind the call's rows: an earlier owner may have left
        NaN, which attention would multiply by zero.

        Raises:
            ValueError: a slot has not all pages that its rows need; nothing has been touched.
        """
        self.check(ends, rows)
        size = self._pool.page_size
        for slot, end in ends.items():
            column, used = divmod(end, size)
            if used and column * size >= max(end - rows, self._reached[slot]):
                for name, pool in self._pools.items():
                    pool.reshape(-1, *pool.shape[2:])[self._rows_behind(name, slot, end)] = 0
            self._reached[slot] = max(self._reached[slot], end)
        return self._pool.cover(round_length(max(ends.values())))

    def address(self, name: str, first_slot: int) -> int:
        """Address of the named pool: the same for every slot."""
        return int(self._pools[name].ctypes.data)

    def read_row(self, name: str, slot: int, position: int) -> FloatArray:
        """What the named pool holds of a position of a sequence, [kv heads, D]."""
        pool = self._pools[name]
        place = self.of(self._windows[name]).row(slot, position)
        row: FloatArray = pool.reshape(-1, *pool.shape[2:])[place]
        return row

    def shape(self, name: str, batch: int) -> list[int]:
        """Shape [pages + 1, page_size, kv heads, D] of the named pool, whatever the batch."""
        return list(self._pools[name].shape)

    def move(self, source: int, destination: int, length: int = 0) -> None:
        super().move(source, destination)
        self._reached[destination] = self._reached[source]

    def clear(self, slot: int, length: int = 0) -> None:
        super().clear(slot)
        self._reached[slot] = 0

    def _rows_behind(self, name: str, slot: int, end: int) -> slice:
        """Rows of the named pool that are on the page of a slot's position `end`, from it on."""
        first = self.of(self._windows[name]).row(slot, end)
        return slice(first, first + self._pool.page_size - end % self._pool.page_size)


class RecurrentStates(StatePositions):
    """What each slot's sequence has in recurrent layers, by graph input name.

    Args:
        shapes: of one sequence.
        slots, copies, replay: see StatePositions.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], slots: int, copies: int, replay: int
    ) -> None:
        super().__init__(shapes, slots, copies, replay)
        held = slots + copies
        self._arrays = allocate_zeros({name: (held, *size) for name, size in shapes.items()})

    def shape(self, name: str, batch: int) -> list[int]:
        """Shape of a range of `batch` slots."""
        return [batch, *self._arrays[name].shape[1:]]

    def address(self, name: str, first_slot: int) -> int:
        """Address of the first byte of `first_slot` in the named array."""
        array = self._arrays[name]
        return int(array.ctypes.data) + first_slot * int(array.strides[0])

    def move(self, source: int, destination: int) -> None:
        """Copies what a slot has to another."""
        for array in self._arrays.values():
            array[destination] = array[source]
        super().move(source, destination)


def allocate_zeros(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, FloatArray]:
    """Zeroed float32 arrays in one anonymous mapping: what is never touched costs nothing.

    Raises:
        OSError: ENOMEM, more than the system would ever give.
    """
    item = np.dtype(np.float32).itemsize
    total = sum(math.prod(shape) for shape in shapes.values()) * item
    if total > sys.maxsize:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    mapping = mmap.mmap(-1, max(1, total))
    arrays: dict[str, FloatArray] = {}
    offset = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        arrays[name] = np.frombuffer(mapping, np.float32, count, offset).reshape(shape)
        offset += count * item
    return arrays


def round_length(positions: int) -> int:
    """The shortest length of a cache that holds `positions` and keeps the promise of bits."""
    return max(FIRST_LENGTH, _round_up(positions))


def _round_up(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP

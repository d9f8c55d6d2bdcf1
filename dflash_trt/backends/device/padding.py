"""Few shapes for many calls: idle sequences beside a call's own, idle rows behind a prompt's.

A new shape costs TensorRT-RTX a compilation, plugins that were compiled ahead of time another load
of their kernels, and a step its CUDA graph. Why no idle row is ever seen: docs/design/engines.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dflash_trt.backends.base import (
    ExecutorLimits,
    Int64Array,
    StepCall,
    TargetCall,
    TargetGraph,
)

SMALLEST_CHUNK = 16
"""Rows: a pass of fewer takes no less, since it reads the same weights."""


def padded_sizes(least: int, most: int) -> list[int]:
    """Doublings of `least` below `most`, and `most` itself."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= 2
    return [*sizes, most]


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """What a call runs as: sequences from slot `first_slot` on, `rows` rows each.

    The call's own are those of `live`; `starts` [B] are the cache positions of all others' rows.
    """

    first_slot: int
    rows: int
    starts: Int64Array
    live: slice

    @property
    def batch(self) -> int:
        """Sequences, idle ones included."""
        return len(self.starts)


class SlotRows:
    """How far each slot is written, by its sequence and behind that by idle rows.

    Idle rows lie only where no sequence has written, and are left to be zeroed before the slot's
    own next call. In paged caches they lie on the page that is nobody's, or behind a sequence's own
    rows, and are left as they are, since kernels read no row that a sequence does not hold.

    A recurrent state takes every row of a sequence's own call, so there chunks run as they are.
    Idle sequences change no state.
    """

    def __init__(self, limits: ExecutorLimits) -> None:
        self._limits = limits
        self._is_paged = limits.page_pool is not None
        self._held = [0] * limits.max_batch
        self._idle_ends = [0] * limits.max_batch
        self._batches = padded_sizes(1, limits.max_batch)
        smallest = limits.prefill_chunk if limits.has_state else SMALLEST_CHUNK
        self._chunks = padded_sizes(smallest, limits.prefill_chunk)

    def frame(self, call: TargetCall | StepCall) -> Frame:
        """What `call` runs as; as it is, if there is no place for idle rows."""
        rows = call.rows
        if isinstance(call, TargetCall) and call.batch == 1 and rows > 1:
            rows = self._pad_chunk(call.first_slot, int(call.starts[0]), rows)
        padded = self._find_frame(call.first_slot, self._pad_batch(call.batch), rows, call.batch)
        if padded is not None:
            return padded
        alone = np.zeros(call.batch, np.int64)
        return Frame(call.first_slot, rows, alone, slice(0, call.batch))

    def usual_calls(
        self, rows: Mapping[int, int], plain: TargetGraph
    ) -> Iterator[tuple[TargetCall | StepCall, Frame]]:
        """Calls of no sequence and what they run as: every shape of these steps and of chunks.

        `rows` and `plain` are as in `Executor.warm_up`.
        """
        none, row = np.empty(0, np.int64), np.empty((0, 1), np.int64)
        sampling = np.empty((0, 4), np.int64) if self._limits.draws else None

        def forward(graph: TargetGraph, size: int, *, is_chunk: bool) -> TargetCall:
            ids = np.empty((0, size), np.int64)
            return TargetCall(graph, 0, ids, none, row, sampling=sampling, is_chunk=is_chunk)

        calls: dict[tuple[int, str, int], TargetCall | StepCall] = {}
        for batch, count in sorted(rows.items()):
            graph: TargetGraph = plain if count == 1 else "target"
            for size in (1, *self._chunks):
                calls.setdefault((1, graph, size), forward(graph, size, is_chunk=True))
            step = StepCall(0, none, none, count, sampling=sampling)
            call = forward(plain, 1, is_chunk=False) if count == 1 else step
            calls.setdefault((self._pad_batch(batch), "step", count), call)
        for (padded, *_), call in calls.items():
            frame = self._find_frame(0, padded, call.rows, 0)
            if frame is not None:
                yield call, frame

    def hold(self, ends: Mapping[int, int]) -> None:
        """Notes that sequences write up to `ends`, by slot."""
        for slot, end in ends.items():
            self._held[slot] = max(self._held[slot], end)

    def note(self, frame: Frame, starts: Int64Array) -> None:
        """Notes the idle rows of a frame whose sequences, idle ones too, begin at `starts` [B]."""
        if self._is_paged:
            return
        for slot, end in enumerate((starts + frame.rows).tolist(), frame.first_slot):
            self._idle_ends[slot] = max(self._idle_ends[slot], end)

    def take_idle(self, slots: Iterable[int]) -> Iterable[tuple[int, int, int]]:
        """Slots with rows that idle ones left, and where these begin and end; forgets them."""
        for slot in slots:
            begin, end = self._held[slot], self._idle_ends[slot]
            self._idle_ends[slot] = 0
            if begin < end:
                yield slot, begin, end

    def is_held(self, slot: int) -> bool:
        """Whether a sequence has written in a slot."""
        return self._held[slot] > 0

    def replace(self, slot: int, held: int) -> int:
        """Notes that of a slot only `held` rows are left; where all that it had ended."""
        end = max(self._held[slot], self._idle_ends[slot])
        self._held[slot], self._idle_ends[slot] = held, 0
        return end

    def _pad_chunk(self, slot: int, start: int, rows: int) -> int:
        """Rows to run a chunk with: more, if nothing lies behind it and they fit."""
        if self._limits.has_state:
            return rows
        size = next((size for size in self._chunks if size >= rows), rows)
        fits = start + size <= self._limits.max_seq_len and start + rows >= self._held[slot]
        return size if fits else rows

    def _find_frame(self, first_slot: int, batch: int, rows: int, own: int) -> Frame | None:
        """`batch` sequences, those of `own` slots from `first_slot` on among them.

        None where a slot of the others has no room for `rows` rows behind its own.
        """
        begin, starts = first_slot, np.zeros(batch, np.int64)
        if not self._is_paged or self._limits.has_state:
            begin = min(first_slot, self._limits.max_batch - batch)
        if not self._is_paged:
            starts[:] = self._held[begin : begin + batch]
        live = slice(first_slot - begin, first_slot - begin + own)
        starts[live] = 0
        fits = starts.max() + rows <= self._limits.max_seq_len
        return Frame(begin, rows, starts, live) if fits else None

    def _pad_batch(self, batch: int) -> int:
        return next(size for size in self._batches if size >= batch)

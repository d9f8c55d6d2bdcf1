"""An executor whose engines are held to what sequences hold, by the words of whoever calls it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dflash_trt.backends.base import SpeculationOutput, StepCall, TargetCall, TargetOutput
from dflash_trt.backends.page_bindings import HANDED_BACK
from dflash_trt.backends.tensorrt.run.executor import TensorRtExecutor
from tests.backends.tensorrt.machine import Machine


class Watched:
    """An executor whose engines may change no row that a sequence holds, its own ones included.

    What is held changes when the stream gets there: a dropped step may still run before a move.

    `handed_back` counts the bindings that gave a window's pages back while a step was under way.

    With `overflows`, what idle rows leave in linear caches becomes NaN when a call ends: rows that
    are not zero behind all that was written for a slot's own sequence.
    """

    def __init__(
        self, machine: Machine, executor: TensorRtExecutor, *, overflows: bool = False
    ) -> None:
        self._machine, self._executor, self._overflows = machine, executor, overflows
        slots = executor.limits.max_batch
        self._pool = executor.limits.page_pool
        self._held, self._ends = [0] * slots, [0] * slots
        # By window; those of layers without one under None.
        self._pages: dict[int | None, list[list[int]]] = {
            window: [[]] * slots for window in (self._pool.kinds if self._pool else {None: 0})
        }
        self._shapes = machine.bundle.layout.of()
        self.checked = self.overflown = self.handed_back = 0
        machine.trt.guards.append(self._check)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def forward(self, call: TargetCall) -> TargetOutput:
        self._begin(call, call.rows)
        output = self._executor.forward(call)
        self._hold(call, call.rows)
        self._overflow()
        return output

    def speculate(self, call: StepCall) -> SpeculationOutput:
        self._begin(call, call.rows * (1 + call.ahead))
        output = self._executor.speculate(call)
        self._overflow()
        return output

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self._executor.move_slot(source, destination, length)
        self._ends[destination] = length

        def moved() -> None:
            self._held[destination] = length
            for pages in self._pages.values():
                pages[destination] = pages[source]

        self._in_order(moved)

    def release_slots(self, first_free: int) -> None:
        self._executor.release_slots(first_free)
        for slot in range(first_free, len(self._held)):
            for window in self._pages:
                self._bind(slot, [], window)

    def bind_pages(self, slot: int, page_ids: Sequence[int], window: int | None = None) -> None:
        lookahead = self._executor.lookahead
        is_under_way, before = bool(lookahead._begun), lookahead.dropped
        self._executor.bind_pages(slot, page_ids, window)
        self._bind(slot, list(page_ids), window)
        stays = lookahead.dropped == before
        self.handed_back += is_under_way and stays and HANDED_BACK in page_ids

    def _bind(self, slot: int, pages: list[int], window: int | None = None) -> None:
        if not pages:
            self._ends[slot] = 0

        def bound() -> None:
            self._pages[window][slot] = pages
            if not pages:
                self._held[slot] = 0

        self._in_order(bound)

    def _begin(self, call: TargetCall | StepCall, rows: int) -> None:
        for slot, start in zip(call.slots, call.starts.tolist(), strict=True):
            self._ends[slot] = max(self._ends[slot], start + rows)
        self._hold(call, 0)

    def _hold(self, call: TargetCall | StepCall, rows: int) -> None:
        starts = call.starts.tolist()

        def held() -> None:
            for slot, start in zip(call.slots, starts, strict=True):
                self._held[slot] = max(self._held[slot], start + rows)
                if self._pool is not None:
                    self._give_up(slot, start // self._pool.page_size)

        self._in_order(held)

    def _in_order(self, change: Callable[[], None]) -> None:
        self._machine.cuda.submit(self._executor.device.stream, change)

    def _give_up(self, owner: int, column: int) -> None:
        """Lets preempted sequences go, whose pages `owner` now writes, from `column` on."""
        for bound in self._pages.values():
            own = {*bound[owner][column:]} - {HANDED_BACK}
            for slot, pages in enumerate(bound):
                if slot != owner and own.intersection(pages):
                    self._held[slot] = 0

    def _check(self, name: str, address: int, before: np.ndarray, after: np.ndarray) -> None:
        place = address - self._executor.caches.address(name, 0)
        slot_bytes = before.nbytes // len(before)
        if self._pool is None and 0 <= place < len(self._held) * slot_bytes:
            for slot, old, new in zip(itertools.count(place // slot_bytes), before, after):
                end = self._held[slot]
                self._compare(f"{name} of slot {slot}", old[:, :end], new[:, :end])
        elif self._pool is not None and place == 0:
            for slot, pages in enumerate(self._pages[self._shapes[name].window]):
                positions, size = np.arange(self._held[slot]), self._pool.page_size
                columns = np.array(pages, int)[positions // size]
                kept = columns != HANDED_BACK
                rows = columns[kept], positions[kept] % size
                self._compare(f"{name} of slot {slot}", before[rows], after[rows])

    def _compare(self, what: str, before: np.ndarray, after: np.ndarray) -> None:
        self.checked += before.size > 0
        assert before.tobytes() == after.tobytes(), f"{what}: rows that a sequence holds"

    def _overflow(self) -> None:
        if not self._overflows:
            return
        for held in self._machine.caches(self._executor).values():
            for slot, end in enumerate(self._ends):
                rows = held[slot, :, end:]
                is_idle = (rows != 0).any(-1)
                self.overflown += int(is_idle.any())
                rows[is_idle] = np.nan

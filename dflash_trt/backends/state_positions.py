"""How far each slot's sequence has come in recurrent layers, whoever holds their states."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from dflash_trt.core.arrays import Int64Array


class StatePositions:
    """Where each slot's sequence may go on: anywhere from `state_start` to `rows_end`, or at 0.

    A call that wrote S rows from `start` on leaves states at max(start, start + S - replay) and
    rows up to start + S: whatever it drafted may be rejected, and the next call may begin anywhere
    between. It may also begin at 0, which is another sequence; nothing need be cleared for it.

    Args:
        names: of the recurrent layers' inputs; without any it is false, and checks nothing.
        slots: those of the executor; behind them lie those of copies.
        copies: numbered from 0.
        replay: rows that a call may take back.
    """

    def __init__(self, names: Collection[str], slots: int, copies: int, replay: int) -> None:
        self._names, self.slots, self._replay = names, slots, replay
        self.state_start = np.zeros(slots + copies, np.int64)
        self.rows_end = np.zeros(slots + copies, np.int64)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __bool__(self) -> bool:
        return bool(self._names)

    def begin(self, slots: range, starts: Int64Array) -> None:
        """Checks that rows may follow at `starts`; until `end`, none may.

        Raises:
            ValueError: a slot's state has gone past a start, or its rows end before it. Nothing
                has been touched.
        """
        if not self:
            return
        part, is_new = slice(slots.start, slots.stop), starts == 0
        fits = (self.state_start[part] <= starts) & (starts <= self.rows_end[part]) | is_new
        if not fits.all():
            index = int(fits.argmin())
            slot, start = slots[index], int(starts[index])
            first, last = self.state_start[slot], self.rows_end[slot]
            raise ValueError(f"slot {slot} can go on at {first} … {last} or 0, not at {start}")
        self.state_start[part][is_new] = 0
        self.rows_end[part][is_new] = 0

    def end(self, slots: range, starts: Int64Array, rows: int) -> None:
        """Says that `rows` rows have been written from `starts` on."""
        part = slice(slots.start, slots.stop)
        self.rows_end[part] = starts + rows
        self.state_start[part] = np.maximum(starts, starts + rows - self._replay)

    def can_resume(self, slot: int, position: int) -> bool:
        """Whether the next call of `slot` could begin at `position`, with the same sequence."""
        return bool(self.state_start[slot] <= position <= self.rows_end[slot])

    def keep(self, slot: int, copy: int) -> None:
        """Copies what `slot` has, as its last call left it."""
        self.move(slot, self.slots + copy)

    def restore(self, copy: int, slot: int) -> None:
        """Gives `slot` what `copy` has, to go on wherever its first owner could."""
        self.move(self.slots + copy, slot)

    def lose(self, slots: range) -> None:
        """Says that a call over `slots` broke off: their sequences can only begin again."""
        part = slice(slots.start, slots.stop)
        self.state_start[part], self.rows_end[part] = 1, 0

    def move(self, source: int, destination: int) -> None:
        """Says that a slot has got what another has."""
        self.state_start[destination] = self.state_start[source]
        self.rows_end[destination] = self.rows_end[source]

    def clear(self, slot: int) -> None:
        """Forgets a slot's sequence."""
        self.state_start[slot] = self.rows_end[slot] = 0

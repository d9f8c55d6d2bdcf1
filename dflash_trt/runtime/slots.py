"""Which request lives in which slot of the caches."""

from __future__ import annotations

from collections.abc import Callable

from dflash_trt.runtime.request import RequestState

MoveSlot = Callable[[int, int, int], None]


class SlotTable:
    """Decoding requests fill slots 0 … n-1 without a gap; one more may be prefilling above.

    A decode pass binds a contiguous range of slots, so a slot that empties is filled with the
    last one's rows. The prefilling request stays where it began and moves, if the decoding
    ones have shrunk away from it, once: when its prompt is done.
    """

    def __init__(self, slots: int, move_slot: MoveSlot) -> None:
        self._slots = slots
        self._move_slot = move_slot
        self._decoding: list[RequestState] = []
        self._prefilling: RequestState | None = None
        self._prefill_slot = 0

    @property
    def capacity(self) -> int:
        return self._slots

    @property
    def decoding(self) -> tuple[RequestState, ...]:
        """The decoding requests; the index is the slot."""
        return tuple(self._decoding)

    @property
    def prefilling(self) -> RequestState | None:
        return self._prefilling

    @property
    def prefill_slot(self) -> int:
        """The slot of the prefilling request; meaningless without one."""
        return self._prefill_slot

    @property
    def used(self) -> int:
        """The index from which on slots hold nothing that is needed."""
        prefilled = 0 if self._prefilling is None else self._prefill_slot + 1
        return max(len(self._decoding), prefilled)

    def can_place(self) -> bool:
        return self._prefilling is None and len(self._decoding) < self._slots

    def place(self, state: RequestState) -> None:
        """Gives `state` the first free slot to prefill in."""
        self._prefilling = state
        self._prefill_slot = len(self._decoding)

    def start_decoding(self) -> None:
        """Lets the prefilling request, its prompt now cached, join the decoding ones."""
        if self._prefilling is None:
            raise ValueError("no request is prefilling")
        slot = len(self._decoding)
        if slot != self._prefill_slot:
            self._move_slot(self._prefill_slot, slot, self._prefilling.cached_length)
        self._decoding.append(self._prefilling)
        self._prefilling = None

    def release(self, state: RequestState) -> bool:
        """Empties the slot of `state`; False when it has none."""
        if state is self._prefilling:
            self._prefilling = None
            return True
        slot = self.find(state)
        if slot is None:
            return False
        last = self._decoding.pop()
        if last is not state:
            self._move_slot(len(self._decoding), slot, last.cached_length)
            self._decoding[slot] = last
        return True

    def find(self, state: RequestState) -> int | None:
        """The slot that `state` decodes in; None if it has none."""
        return next((slot for slot, one in enumerate(self._decoding) if one is state), None)

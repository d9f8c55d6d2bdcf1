"""Which request lives in which slot of the caches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dflash_trt.decoding.state import RequestState

MoveSlot = Callable[[int, int, int], None]

SHORTEST_PREFIX = 16
"""Tokens; a copy of fewer saves nothing."""


class SlotTable:
    """Decoding requests fill slots 0 … n-1 without a gap; one more may be prefilling above.

    A decode pass binds a contiguous range of slots, so a slot that empties is filled with the
    last one's rows. The prefilling request moves at most once, when its prompt is done: down to
    the decoding ones, if there are fewer by then.

    Attributes:
        prefill_slot: where `prefilling` is; meaningless without one.
    """

    def __init__(self, slots: int, move_slot: MoveSlot) -> None:
        self.capacity = slots
        self.prefilling: RequestState | None = None
        self.prefill_slot = 0
        self._move_slot = move_slot
        self._decoding: list[RequestState] = []

    @property
    def decoding(self) -> tuple[RequestState, ...]:
        """The decoding requests; the index is the slot."""
        return tuple(self._decoding)

    @property
    def used(self) -> int:
        """The index from which on slots hold nothing that is needed."""
        prefilled = 0 if self.prefilling is None else self.prefill_slot + 1
        return max(len(self._decoding), prefilled)

    def can_place(self) -> bool:
        return self.prefilling is None and len(self._decoding) < self.capacity

    def place(self, state: RequestState) -> None:
        """Gives `state` the first free slot to prefill in."""
        self.prefilling = state
        self.prefill_slot = len(self._decoding)

    def copy_prefix(self) -> None:
        """For linear caches: copies to the prefilling request what a decoding one has of it.

        Samples of one prompt run it once this way. One token is left to run: its row has the next.
        """
        state = self.prefilling
        if state is None or not self._decoding or state.scores_prompt:
            return
        shared = [_count_shared(state, other) for other in self._decoding]
        slot = max(range(len(shared)), key=shared.__getitem__)
        if shared[slot] >= SHORTEST_PREFIX:
            self._move_slot(slot, self.prefill_slot, shared[slot])
            state.begin_prefill(shared[slot])

    def start_decoding(self) -> None:
        """Lets the prefilling request, its prompt now cached, join the decoding ones."""
        if self.prefilling is None:
            raise ValueError("no request is prefilling")
        slot = len(self._decoding)
        if slot != self.prefill_slot:
            self._move_slot(self.prefill_slot, slot, self.prefilling.cached_length)
        self._decoding.append(self.prefilling)
        self.prefilling = None

    def release(self, state: RequestState) -> bool:
        """Empties the slot of `state`; False when it has none."""
        if state is self.prefilling:
            self.prefilling = None
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


def _count_shared(state: RequestState, other: RequestState) -> int:
    """Leading tokens of what `state` prefills whose rows `other` has, the drafter's too."""
    most = min(state.prefill_length - 1, other.shareable_length)
    few = min(most, SHORTEST_PREFIX)
    if state.ids(0, few) != other.ids(0, few):
        return 0
    differ = np.array(state.ids(0, most)) != np.array(other.ids(0, most))
    return int(differ.argmax()) if differ.any() else most

"""Who runs next: flows take turns at slots (`turns.py`); decode passes between prompt chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from dflash_trt.decoding.paging import PageTables
from dflash_trt.decoding.state import RequestState
from dflash_trt.decoding.turns import WaitingLine, find_yielding, find_youngest

MoveSlot = Callable[[int, int, int], None]

SHORTEST_PREFIX = 16
"""Tokens; a copy of fewer saves nothing."""
SCORED_ROWS = 32
"""Of a prompt's chunk whose logits are all wanted: 20 MB for a vocabulary of 151,936."""


@dataclass(slots=True)
class DecodeBatch:
    """Consecutive slots, from `first_slot` on, whose requests want blocks of `rows` rows."""

    first_slot: int
    rows: int
    states: tuple[RequestState, ...]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The next tokens of the prefilling request; `is_last` completes what it has to prefill."""

    slot: int
    state: RequestState
    token_ids: tuple[int, ...]
    is_last: bool


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


class Scheduler:
    """Holds every live request: waiting, prefilling or decoding.

    With pages, an executor that `looks_ahead` gets those of two blocks while there are enough. The
    second block's are taken back before anyone is preempted or waits for lack of pages. With
    linear caches, `copies_prefix` takes what a neighbour has of a prompt from it. Blocks end before
    `drafts_end`, where that comes before the context's end; behind it steps have one row.

    Attributes:
        slots: the requests that decode, and the one that prefills.
    """

    def __init__(
        self,
        slots: int,
        max_seq_len: int,
        prefill_chunk: int,
        move_slot: MoveSlot,
        paging: PageTables | None = None,
        *,
        looks_ahead: bool = False,
        copies_prefix: bool = True,
        drafts_end: int | None = None,
    ) -> None:
        self._max_seq_len = max_seq_len
        self._prefill_chunk = prefill_chunk
        self._waiting = WaitingLine()
        self.slots = SlotTable(slots, move_slot)
        self._paging = paging
        self._looks_ahead = looks_ahead
        self._copies_prefix = copies_prefix and paging is None
        self._drafts_end = max_seq_len if drafts_end is None else drafts_end

    @property
    def running(self) -> tuple[RequestState, ...]:
        """The requests that hold a slot."""
        prefilling = self.slots.prefilling
        return self.slots.decoding if prefilling is None else (*self.slots.decoding, prefilling)

    @property
    def will_prefill(self) -> bool:
        """Whether a prompt is being prefilled, or can start in a slot that is free or yielded."""
        if self.slots.prefilling is not None:
            return True
        if not self._waiting:
            return False
        state = self._waiting.find_next(self.running)
        return self.slots.can_place() or find_yielding(state, self.running) is not None

    def add(self, state: RequestState) -> None:
        self._waiting.add(state)

    def plan_decode(self, most_rows: int | None = None) -> list[DecodeBatch]:
        """One decode step of every decoding request, in as few passes as their blocks allow.

        Requests whose blocks differ cannot share a pass: each run of equal neighbours is one. They
        differ by a request's own size, and at the end of the context. With an executor that looks
        ahead, those whose rows the host reads are passes of their own, so that the others go on
        ahead. `most_rows` bounds all. Where pages run out, the youngest of larger flows wait again.
        """
        if self._paging is not None:
            self._make_room(self._paging)
        kinds: list[tuple[int, bool]] = []
        for state in (states := self.slots.decoding):
            rows = min(state.rows, most_rows or state.rows)
            rows = min(rows, max(1, self._drafts_end - state.cached_length))
            kinds.append((rows, self._looks_ahead and state.request.reads_rows))
        batches: list[DecodeBatch] = []
        first = 0
        for end in range(1, len(kinds) + 1):
            if end == len(kinds) or kinds[end] != kinds[first]:
                batches.append(DecodeBatch(first, kinds[first][0], states[first:end]))
                first = end
        return batches

    def plan_prefill(self) -> PrefillChunk | None:
        """The next chunk of the prompt whose turn it is; None when no slot or prompt is left.

        It waits, and all behind it, where pages are too few for it and one block and no flow yields
        more. One that has begun waits where windowed layers have too few for its next chunk.
        """
        self._place_next()
        state = self.slots.prefilling
        if state is None:
            return None
        start = state.prefilled
        rows = min(self._prefill_chunk, SCORED_ROWS) if state.scores_prompt else self._prefill_chunk
        end = min(start + rows, state.prefill_length)
        if self._paging is not None:
            end = self._paging.end_chunk(state, end)
            while not self._paging.reserve(state, self.slots.prefill_slot, end):
                if not self._trim(self._paging):
                    return None
        return PrefillChunk(
            slot=self.slots.prefill_slot,
            state=state,
            token_ids=tuple(state.ids(start, end)),
            is_last=end == state.prefill_length,
        )

    def release(self, state: RequestState) -> None:
        """Takes a request out, waiting or running, and frees its pages and slot."""
        if self._paging is not None:
            self._paging.forget(state)
        if not self.slots.release(state):
            self._waiting.remove(state)

    def _place_next(self) -> None:
        """Gives whoever's turn it is a slot, where one is free or a larger flow yields it.

        Waiting for a neighbour's end would take as long as that one's answer; what it has computed
        is computed again, which takes a prompt's time.
        """
        if self.slots.prefilling is not None or not self._waiting:  # as at most steps
            return
        state = self._waiting.find_next(self.running)
        while not (self.slots.can_place() and self._has_pages(state)):
            yielding = find_yielding(state, self.running)
            if yielding is None:
                return
            self._preempt(yielding, is_next=False)
        self._waiting.take(state)
        self.slots.place(state)
        if self._copies_prefix:
            self.slots.copy_prefix()

    def _has_pages(self, state: RequestState) -> bool:
        if self._paging is None:
            return True
        end = min(state.prefill_length + state.rows, self._max_seq_len)
        slot = len(self.slots.decoding)
        while not self._paging.admit(state, slot, end):
            if not self._trim(self._paging):
                return False
        return True

    def _make_room(self, paging: PageTables) -> None:
        slots = [*range(len(self.slots.decoding)), self.slots.prefill_slot]
        for slot, state in zip(slots, self.running, strict=False):
            paging.publish(state)
            paging.keep_state(state, slot)
        for state in sorted(self.slots.decoding, key=attrgetter("request_id")):
            end, slot = self._block_end(state), self.slots.find(state)
            while slot is not None and not paging.reserve(state, slot, end):
                if not self._trim(paging):
                    self._preempt(find_youngest(self.running), is_next=True)
                slot = self.slots.find(state)
        if self._looks_ahead and not self.will_prefill:  # the block behind it as well
            for slot, state in enumerate(self.slots.decoding):
                paging.reserve(state, slot, self._block_end(state, blocks=2))

    def _trim(self, paging: PageTables) -> bool:
        decoding = enumerate(self.slots.decoding)
        freed = [paging.trim(state, slot, self._block_end(state)) for slot, state in decoding]
        return any(freed)

    def _block_end(self, state: RequestState, blocks: int = 1) -> int:
        return min(state.cached_length + blocks * state.rows, self._max_seq_len)

    def _preempt(self, state: RequestState, *, is_next: bool) -> None:
        if self._paging is not None:
            self._paging.vacate(state)
        self.slots.release(state)
        state.preempt(yields=not is_next)
        self._waiting.put_back(state, is_next=is_next)


def _count_shared(state: RequestState, other: RequestState) -> int:
    """Leading tokens of what `state` prefills whose rows `other` has, the drafter's too."""
    most = min(state.prefill_length - 1, other.cached_length)
    few = min(most, SHORTEST_PREFIX)
    if state.ids(0, few) != other.ids(0, few):
        return 0
    differ = np.array(state.ids(0, most)) != np.array(other.ids(0, most))
    return int(differ.argmax()) if differ.any() else most

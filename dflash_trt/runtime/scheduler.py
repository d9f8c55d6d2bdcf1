"""Who runs next: first come, first served into slots; decode passes between prompt chunks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import groupby

from dflash_trt.runtime.request import RequestState
from dflash_trt.runtime.slots import MoveSlot, SlotTable


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Consecutive slots, from `first_slot` on, whose requests want blocks of `rows` rows."""

    first_slot: int
    rows: int
    states: tuple[RequestState, ...]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The next prompt tokens of the prefilling request; `is_last` completes its prompt."""

    slot: int
    state: RequestState
    token_ids: tuple[int, ...]
    is_last: bool


class Scheduler:
    """Holds every live request: waiting, prefilling or decoding."""

    def __init__(
        self, slots: int, max_seq_len: int, prefill_chunk: int, move_slot: MoveSlot
    ) -> None:
        self._max_seq_len = max_seq_len
        self._prefill_chunk = prefill_chunk
        self._waiting: deque[RequestState] = deque()
        self._slots = SlotTable(slots, move_slot)

    @property
    def decoding(self) -> tuple[RequestState, ...]:
        """The decoding requests, in slot order."""
        return self._slots.decoding

    @property
    def running(self) -> tuple[RequestState, ...]:
        """The requests that hold a slot."""
        prefilling = self._slots.prefilling
        return self.decoding if prefilling is None else (*self.decoding, prefilling)

    @property
    def used_slots(self) -> int:
        """Slots from this one on hold nothing that is needed."""
        return self._slots.used

    def add(self, state: RequestState) -> None:
        self._waiting.append(state)

    def plan_decode(self) -> list[DecodeBatch]:
        """One decode step of every decoding request, in as few passes as their blocks allow.

        Requests whose blocks differ (their own block size, or a block cut short by the end of
        the context) cannot share a pass; each run of equal neighbours is one.
        """
        batches: list[DecodeBatch] = []
        first_slot = 0
        for rows, run in groupby(self._slots.decoding, self._count_rows):
            states = tuple(run)
            batches.append(DecodeBatch(first_slot, rows, states))
            first_slot += len(states)
        return batches

    def plan_prefill(self) -> PrefillChunk | None:
        """The next chunk of the oldest unfinished prompt; None when no slot or prompt is left."""
        if self._waiting and self._slots.can_place():
            self._slots.place(self._waiting.popleft())
        state = self._slots.prefilling
        if state is None:
            return None
        start = state.prefilled
        end = min(start + self._prefill_chunk, state.prompt_length)
        return PrefillChunk(
            slot=self._slots.prefill_slot,
            state=state,
            token_ids=tuple(state.request.prompt_ids[start:end]),
            is_last=end == state.prompt_length,
        )

    def start_decoding(self) -> None:
        """Lets the request whose prompt is complete join the decoding ones."""
        self._slots.start_decoding()

    def release(self, state: RequestState) -> None:
        """Forgets `state`, wherever it is."""
        if not self._slots.release(state):
            self._waiting.remove(state)

    def _count_rows(self, state: RequestState) -> int:
        return min(state.rows, self._max_seq_len - state.cached_length)

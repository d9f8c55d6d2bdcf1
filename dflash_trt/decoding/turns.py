"""Who waits for a slot, and whose turn it is: flows share the slots, however much each asks for."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence

from dflash_trt.decoding.state import RequestState


class WaitingLine:
    """Requests without a slot, by flow: what one client's call has asked for together.

    Next comes whoever holds the fewest slots; of those the one that has waited longest for its
    turn. Requests of one flow stay in order, and so do those that are flows of their own.
    """

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[RequestState]] = {}  # in order of turns

    def add(self, state: RequestState) -> None:
        self._lines.setdefault(state.flow, deque()).append(state)

    def put_back(self, state: RequestState, *, is_next: bool) -> None:
        """Takes a preempted request in before the others of its flow; `is_next`: before all."""
        self._lines.setdefault(state.flow, deque()).appendleft(state)
        if is_next:
            self._lines = {state.flow: self._lines.pop(state.flow), **self._lines}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def find_next(self, running: Sequence[RequestState]) -> RequestState:
        """Whose turn it is beside `running`, where somebody waits."""
        held = Counter(one.flow for one in running)
        return self._lines[min(self._lines, key=held.__getitem__)][0]

    def take(self, state: RequestState) -> None:
        """Lets `state` go, which has its turn; its flow's next one comes after all that wait."""
        self.remove(state)
        if state.flow in self._lines:
            self._lines[state.flow] = self._lines.pop(state.flow)

    def remove(self, state: RequestState) -> None:
        """Lets `state` go; nobody's turn changes."""
        line = self._lines[state.flow]
        line.remove(state)
        if not line:
            del self._lines[state.flow]


def find_youngest(running: Sequence[RequestState]) -> RequestState:
    """Who of `running` loses its place first: the youngest of the flow that holds most slots."""
    held = Counter(one.flow for one in running)
    return max(running, key=lambda one: (held[one.flow], one.request_id))


def find_yielding(state: RequestState, running: Sequence[RequestState]) -> RequestState | None:
    """Who gives its place to `state`: one of a flow that holds two slots more than its own.

    Of its flow it is the one with the least to compute again.
    """
    held = Counter(one.flow for one in running)
    most = max(held.values(), default=0)
    if held[state.flow] + 1 >= most:
        return None
    return max(running, key=lambda one: (held[one.flow], -one.cached_length, one.request_id))

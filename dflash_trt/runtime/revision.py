"""Drafts are put right by their requests' grammars before the target verifies them.

It changes how many are accepted, never which tokens come out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash_trt.backends.base import Int64Array
from dflash_trt.runtime.state import RequestState


def revise_draft(state: RequestState, draft: Sequence[int], most: int) -> list[int]:
    """The draft up to what a grammar forbids, with what it forces; at most `most` tokens."""
    if state.follower is None:
        return list(draft)
    revised = state.follower.revise(draft, most)
    same = sum(one == other for one, other in zip(draft, revised, strict=False))
    state.recorder.forced_tokens += len(revised) - same
    return revised


def make_reviser(states: Sequence[RequestState]) -> Callable[[Int64Array], None] | None:
    """What changes the token ids [B,S] of a step, anchors first; None where it would be nothing."""
    if all(state.follower is None for state in states):
        return None

    def revise(token_ids: Int64Array) -> None:
        for row, state in zip(token_ids, states, strict=True):
            if state.follower is not None:
                revised = revise_draft(state, row[1:].tolist(), len(row) - 1)
                row[1 : 1 + len(revised)] = revised

    return revise

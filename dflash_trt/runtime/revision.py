"""Drafts are put right by what is known of their requests before the target verifies them.

A sampled request's share the noise of its draws, and a grammar's forbid and force tokens. It
changes how many are accepted, never which tokens come out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash_trt.backends.base import ExecutorLimits, FloatArray, Int64Array
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


def make_coupler(
    limits: ExecutorLimits, states: Sequence[RequestState]
) -> Callable[[Int64Array, FloatArray], None] | None:
    """What couples the token ids [B,S] of a step, anchors first, by their logits [B,S-1,V], to the
    noise of the target's draws; None where nothing is drawn, or the executor does it."""
    coupling = limits.coupling
    if coupling is None or limits.draws or all(one.request.sampling.greedy for one in states):
        return None

    def couple(token_ids: Int64Array, logits: FloatArray) -> None:
        for row, scores, state in zip(token_ids, logits, states, strict=True):
            sampling = state.request.sampling
            if not sampling.greedy:
                row[1:] = coupling.choose(scores, row[1:], sampling, state.next_position)

    return couple

"""Who fills a block with drafts: the bundle's draft graph, or the sequence's own text.

A drafter decides only which of the target's tokens one pass computes, never what they are. So do
grammars that put drafts right before the target verifies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from dflash_trt.backends.base import (
    Executor,
    Int64Array,
    SpeculationOutput,
    StepCall,
    TargetCall,
    TargetOutput,
)
from dflash_trt.decoding.drafter_kinds import DFLASH, DrafterKind
from dflash_trt.decoding.state import RequestState

# Tokens of the longest and shortest n-gram that is looked up, by vLLM's names for them.
PROMPT_LOOKUP_MAX, PROMPT_LOOKUP_MIN = 4, 2

Drafts = list[list[int]]


class GraphDrafter:
    """Drafts of the bundle's draft graph; the executor drafts and verifies at once."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def speculate(
        self, step: StepCall, states: Sequence[RequestState]
    ) -> tuple[SpeculationOutput | TargetOutput, Drafts]:
        """Drafts at most `step.block_size - 1` tokens for each of `states`, and verifies them.

        Row i of a sequence's output is the target behind its anchor and i drafts. A sequence may
        have fewer drafts than others, or none; rows behind its drafts mean nothing.
        """
        for state in states:
            if state.follower is not None:
                step = replace(step, revise=make_reviser(states))
                break
        output = self._executor.speculate(step)
        return output, [row[1:] for row in output.token_ids.tolist()]


class PromptLookupDrafter:
    """Drafts what followed the sequence's last tokens when they stood in it before; no weights.

    The plain target verifies, so that nothing is written to the draft's cache. A step in which
    nothing is found is a plain one.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._indices = WeakKeyDictionary[RequestState, NgramIndex]()

    def speculate(
        self, step: StepCall, states: Sequence[RequestState]
    ) -> tuple[SpeculationOutput | TargetOutput, Drafts]:
        """As `GraphDrafter.speculate`."""
        most = step.block_size - 1
        drafts = [revise_draft(state, self._index(state).propose(most), most) for state in states]
        rows = 1 + max(map(len, drafts))
        token_ids = np.zeros((step.batch, rows), np.int64)
        token_ids[:, 0] = step.anchors
        for row, draft in zip(token_ids, drafts, strict=True):
            row[1 : 1 + len(draft)] = draft
        every_row = np.tile(np.arange(rows), (step.batch, 1))
        call = TargetCall(
            "target_only",
            step.first_slot,
            token_ids,
            step.starts,
            every_row,
            step.scores,
            step.sampling,
        )
        return self._executor.forward(call), drafts

    def _index(self, state: RequestState) -> NgramIndex:
        index = self._indices.setdefault(state, NgramIndex())
        index.extend(state.ids(len(index), state.next_position))
        return index


class NgramIndex:
    """Where in a text each n-gram stood last; grows with the text, a few entries a token."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Takes the tokens that follow."""
        for token_id in token_ids:
            # The n-grams that end here are entered once something follows them.
            for size in self._sizes():
                self._behind[tuple(self._ids[-size:])] = len(self._ids)
            self._ids.append(token_id)

    def propose(self, most: int) -> list[int]:
        """`most` tokens, as they followed the longest n-gram that ends the text; or none.

        Where the text ends before that many followed, they repeat.
        """
        for size in self._sizes():
            start = self._behind.get(tuple(self._ids[-size:]))
            if start is not None:
                followed = self._ids[start : start + most]
                return [followed[at % len(followed)] for at in range(most)]
        return []

    def _sizes(self) -> range:
        """Those of the n-grams that end the text, the longest first."""
        longest = min(PROMPT_LOOKUP_MAX, len(self._ids))
        return range(longest, PROMPT_LOOKUP_MIN - 1, -1)


def open_drafter(kind: DrafterKind, executor: Executor) -> GraphDrafter | PromptLookupDrafter:
    """The drafter of that kind, over `executor`."""
    return GraphDrafter(executor) if kind == DFLASH else PromptLookupDrafter(executor)


def revise_draft(state: RequestState, draft: Sequence[int], most: int) -> list[int]:
    """The draft up to what a grammar forbids, with what it forces; at most `most` tokens."""
    if state.follower is None:
        return list(draft)
    revised = state.follower.revise(draft, most)
    known = len(draft)
    state.forced = frozenset(
        place for place, one in enumerate(revised) if place >= known or one != draft[place]
    )
    for counts in (state.recorder, state.recorder.totals):
        counts.forced_tokens += len(state.forced)
    return revised


def make_reviser(states: Sequence[RequestState]) -> Callable[[Int64Array], None]:
    """What changes the token ids [B,S] of a step, anchors first."""

    def revise(token_ids: Int64Array) -> None:
        for row, state in zip(token_ids, states, strict=True):
            if state.follower is not None:
                revised = revise_draft(state, row[1:].tolist(), len(row) - 1)
                row[1 : 1 + len(revised)] = revised

    return revise

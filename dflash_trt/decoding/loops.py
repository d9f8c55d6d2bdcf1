"""Answers that repeat themselves: their drafts are right far more often than those of others."""

from __future__ import annotations

from collections.abc import Sequence

LOOP_TOKENS = 8
LOOP_TIMES = 3


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether some LOOP_TOKENS tokens in a row come LOOP_TIMES times or more without overlap.

    A drafter continues a loop without fail, so an acceptance length with loops in it says little
    about other answers.
    """
    return loop_end(token_ids) is not None


def loop_end(token_ids: Sequence[int]) -> int | None:
    """How many tokens there are when it loops for the first time; None where it never does."""
    # Of each run of tokens: where the last one that counts ends, and how many do.
    seen: dict[tuple[int, ...], tuple[int, int]] = {}
    for start in range(len(token_ids) - LOOP_TOKENS + 1):
        run = tuple(token_ids[start : start + LOOP_TOKENS])
        end, count = seen.get(run, (0, 0))
        if start < end:
            continue
        if count + 1 == LOOP_TIMES:
            return start + LOOP_TOKENS
        seen[run] = (start + LOOP_TOKENS, count + 1)
    return None

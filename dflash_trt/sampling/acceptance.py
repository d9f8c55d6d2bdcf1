"""The rule that decides how much of a drafted block the target keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def accept_block(drafts: Sequence[int], choose: Callable[[int], int]) -> list[int]:
    """The tokens one verify step settles: accepted drafts, then the bonus token.

    Row i is the target after the anchor and i drafts, and `choose(i)` its token there. Drafts
    are accepted while they equal it; the first choice that differs, or the one after the last
    draft, is the bonus. At least one token; rows behind the bonus are never asked for.
    """
    tokens: list[int] = []
    for row, draft in enumerate(drafts):
        token = choose(row)
        tokens.append(token)
        if token != draft:
            return tokens
    tokens.append(choose(len(drafts)))
    return tokens

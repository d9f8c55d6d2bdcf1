"""Tokens that may not come: which, behind what, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_trt.core.masks import TokenMask
from dflash_trt.errors import DflashError
from dflash_trt.sampling.token_rules import Ruled, TokenRules


def _ids(mask: TokenMask) -> list[int]:
    return [one for one in range(12) if mask.has(one)]


def test_a_word_of_several_tokens_is_bad_behind_its_beginning() -> None:
    rules = TokenRules(bad=((5,), (1, 2), (1, 2, 3)))
    assert rules.banned([]) == {5}
    assert rules.banned([1]) == {5, 2} == rules.banned([9, 1])
    assert rules.banned([1, 2]) == {5, 3}
    assert rules.banned([2, 1, 3]) == {5}
    ruled = Ruled(rules.mask(12), rules.banned([1]), None)
    tokens = ruled.tokens()
    assert [one for one in range(12) if ruled.allows(one)] == [0, 1, 3, 4, *range(6, 12)]
    assert _ids(tokens) == [0, 1, 3, 4, *range(6, 12)]


def test_both_kinds_and_a_grammar_hold_together() -> None:
    rules = TokenRules(allowed=(2, 3, 9), bad=((3,),))
    grammar = Ruled(TokenRules(allowed=(3, 9, 10)).mask(12), frozenset(), None)
    ruled = Ruled(rules.mask(12), rules.banned([]), grammar)
    assert _ids(ruled.tokens()) == [9]
    assert [one for one in range(12) if ruled.allows(one)] == [9]
    with pytest.raises(DflashError, match="no token may come next"):
        Ruled(TokenRules(allowed=(3,)).mask(12), frozenset([3]), None).tokens().apply(
            np.zeros(12, np.float32)
        )


@pytest.mark.parametrize(
    ("fields", "piece"),
    [
        ({"allowed": ()}, "allowed_token_ids: names 0 tokens, not 1 to 1,024"),
        ({"allowed": tuple(range(1025))}, "allowed_token_ids: names 1,025 tokens"),
        ({"allowed": (-1,)}, "allowed_token_ids: -1 is no token id"),
        ({"bad": ((True,),)}, "bad_words: True is no token id"),
        ({"bad": ((),)}, "bad_words: a word of 0 tokens has not 1 to 64"),
        ({"bad": ((1,) * 65,)}, "bad_words: a word of 65 tokens"),
        ({"bad": ((1,),) * 1025}, "bad_words: names 1,025 words"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], piece: str) -> None:
    with pytest.raises(DflashError, match=piece):
        TokenRules(**fields)

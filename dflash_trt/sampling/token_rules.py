"""Tokens that may not come at all, or not behind what an output ends with, as vLLM has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_trt.core.masks import Allowed, TokenMask
from dflash_trt.errors import DflashError

MOST_BAD, MOST_BAD_TOKENS, MOST_ALLOWED = 1024, 64, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """What an output is made of.

    Args:
        allowed: the only tokens that may come, at most 1,024; None: all. The end of sequence comes
            if it is among them.
        bad: words of one token or more (at most 1,024, of 64 tokens): the last token of one may
            not come where the output ends with those before it. The prompt does not count.

    Raises:
        DflashError: no tokens, too many, or some that are none (usage).
    """

    allowed: tuple[int, ...] | None = None
    bad: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.allowed is not None and not 0 < len(self.allowed) <= MOST_ALLOWED:
            what = f"names {len(self.allowed):,} tokens, not 1 to {MOST_ALLOWED:,}"
            raise DflashError(what, where="allowed_token_ids", usage=True)
        if len(self.bad) > MOST_BAD:
            what = f"names {len(self.bad):,} words, more than {MOST_BAD:,}"
            raise DflashError(what, where="bad_words", usage=True)
        for word in self.bad:
            if not 0 < len(word) <= MOST_BAD_TOKENS:
                what = f"a word of {len(word):,} tokens has not 1 to {MOST_BAD_TOKENS}"
                raise DflashError(what, where="bad_words", usage=True)
        for where, ids in self.named():
            strange = next((one for one in ids if type(one) is not int or one < 0), None)
            if strange is not None:
                raise DflashError(f"{strange!r} is no token id", where=where, usage=True)

    @property
    def is_neutral(self) -> bool:
        """Whether all tokens may come."""
        return self.allowed is None and not self.bad

    def named(self) -> list[tuple[str, tuple[int, ...]]]:
        """The ids of all its tokens, by the field that names them."""
        return [
            ("allowed_token_ids", self.allowed or ()),
            ("bad_words", tuple(one for word in self.bad for one in word)),
        ]

    def banned(self, output: Sequence[int]) -> frozenset[int]:
        """The tokens that may not follow `output`, for what it ends with."""
        return frozenset(
            word[-1]
            for word in self.bad
            if len(word) <= len(output) + 1
            and (len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1])
        )

    def mask(self, vocab_size: int) -> TokenMask:
        """The tokens that are `allowed`, of a vocabulary that has all of them."""
        if self.allowed is None:
            bits = np.full(-(-vocab_size // 8), 0xFF, np.uint8)
            return TokenMask(bits, vocab_size, "bad_words")
        flags = np.zeros(vocab_size, np.bool_)
        flags[list(self.allowed)] = True
        return TokenMask(np.packbits(flags, bitorder="little"), vocab_size, "allowed_token_ids")


class Ruled:
    """What rules allow in one place, and a grammar if there is one; see `Allowed`."""

    def __init__(self, mask: TokenMask, banned: frozenset[int], grammar: Allowed | None) -> None:
        self._mask, self._banned, self._grammar = mask, banned, grammar

    def allows(self, token_id: int) -> bool:
        """Whether one token may come next."""
        if token_id in self._banned or not self._mask.has(token_id):
            return False
        return self._grammar is None or self._grammar.allows(token_id)

    def tokens(self) -> TokenMask:
        """All that may come next."""
        mask = self._mask
        if self._grammar is not None:
            mask = self._grammar.tokens().within(mask)
        return mask.without(self._banned) if self._banned else mask

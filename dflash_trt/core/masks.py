"""Which tokens may be chosen from a row of logits, as bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dflash_trt.core.arrays import FloatArray
from dflash_trt.errors import DflashError


@dataclass(frozen=True, slots=True, eq=False)
class TokenMask:
    """Token i may come next if bit i % 8, the lowest first, of byte i // 8 is set.

    `bits` uint8 [ceil(vocab_size / 8)] or longer; `where` is what an error names.
    """

    bits: npt.NDArray[np.uint8]
    vocab_size: int
    where: str

    def has(self, token_id: int) -> bool:
        """Whether one token may come next."""
        return bool(self.bits[token_id >> 3] >> (token_id & 7) & 1)

    def apply(self, logits: FloatArray) -> FloatArray:
        """A copy of the row [V] in which what may not come next is minus infinity.

        Raises:
            DflashError: nothing may.
        """
        allowed = np.unpackbits(self.bits, count=self.vocab_size, bitorder="little").view(bool)
        if not allowed.any():
            raise DflashError("no token may come next", where=self.where, usage=True)
        masked: FloatArray = np.where(allowed, logits, np.float32(-np.inf))
        return masked

    def without(self, token_ids: frozenset[int]) -> TokenMask:
        """The mask that also forbids `token_ids`."""
        bits = self.bits.copy()
        for token_id in token_ids:
            bits[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
        return TokenMask(bits, self.vocab_size, self.where)

    def within(self, other: TokenMask) -> TokenMask:
        """What both allow."""
        size = -(-self.vocab_size // 8)
        return TokenMask(self.bits[:size] & other.bits[:size], self.vocab_size, self.where)


class Allowed(Protocol):
    """Says which tokens may come next in one place of one output."""

    def allows(self, token_id: int) -> bool:
        """Whether one token may: cheaper than to say it of all."""

    def tokens(self) -> TokenMask:
        """All that may."""

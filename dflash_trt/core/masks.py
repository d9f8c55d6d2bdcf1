"""Which tokens may be chosen from a row of logits, as bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dflash_trt.core.arrays import FloatArray, Int64Array
from dflash_trt.errors import DflashError

_FEW = 4096
"""Tokens that are listed rather than the row masked."""


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

    @property
    def is_narrow(self) -> bool:
        """Whether `few` lists them."""
        return int(np.count_nonzero(self.bits)) <= _FEW

    def few(self) -> Int64Array | None:
        """Ascending ids of the tokens that may, where they are few; None where they are many.

        Raises:
            DflashError: none may.
        """
        if not self.is_narrow:
            return None
        ids = _list_bits(self.bits, self.vocab_size)
        if not ids.size:
            raise self._nothing()
        return ids

    def have(self, token_ids: Int64Array) -> npt.NDArray[np.bool_]:
        """Of each of `token_ids` [n] whether it may come next."""
        places = (token_ids & 7).astype(np.uint8)
        flags: npt.NDArray[np.uint8] = self.bits[token_ids >> 3] >> places & 1
        return flags.view(np.bool_)

    def apply(self, logits: FloatArray) -> FloatArray:
        """A copy of the row [V] in which what may not come next is minus infinity.

        Raises:
            DflashError: nothing may.
        """
        banned, lowest = ~self.bits, np.float32(-np.inf)
        if np.count_nonzero(banned) > _FEW:
            allowed = np.unpackbits(self.bits, count=self.vocab_size, bitorder="little").view(bool)
            if not allowed.any():
                raise self._nothing()
            masked: FloatArray = np.where(allowed, logits, lowest)
            return masked
        ids = _list_bits(banned, self.vocab_size)
        if len(ids) == self.vocab_size:
            raise self._nothing()
        row = logits.copy()
        row[ids] = lowest
        return row

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

    def _nothing(self) -> DflashError:
        return DflashError("no token may come next", where=self.where)


def _list_bits(bits: npt.NDArray[np.uint8], size: int) -> Int64Array:
    """Ascending places, below `size`, of the bits that are set."""
    # Eight bytes at a time: where few bits are set, few of them are not zero.
    words = np.zeros(-(-len(bits) // 8), "<u8")
    words.view(np.uint8)[: len(bits)] = bits
    filled = np.flatnonzero(words)
    flags = np.unpackbits(words[filled].view(np.uint8), bitorder="little")
    found = np.flatnonzero(flags)
    ids: Int64Array = (filled[found >> 6] << 6) + (found & 63)
    return ids[: np.searchsorted(ids, size)]


class Allowed(Protocol):
    """Says which tokens may come next in one place of one output."""

    @property
    def is_narrow(self) -> bool:
        """Whether few are likely to: all that may are asked for at once then."""

    def allows(self, token_id: int) -> bool:
        """Whether one token may: cheaper than to say it of all."""

    def tokens(self) -> TokenMask:
        """All that may."""

"""Calibration sequences: checked before anything is loaded, cut to the context."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_trt.backends.base import Int64Array
from dflash_trt.errors import DflashError


def check_sequences(
    sequences: Sequence[Sequence[int]], vocab_size: int, context: int
) -> list[Int64Array]:
    """The sequences as arrays [n] of token ids, each cut to its first `context` tokens.

    Raises:
        DflashError: no sequence, an empty one, or an id outside the vocabulary (usage).
    """
    if not sequences:
        raise _unusable("there is no calibration sequence", None)
    checked: list[Int64Array] = []
    for number, sequence in enumerate(sequences, start=1):
        if not len(sequence):
            raise _unusable("it holds no token", number)
        outside = next((one for one in sequence if not 0 <= one < vocab_size), None)
        if outside is not None:
            raise _unusable(f"token id {outside} is outside the vocabulary of {vocab_size}", number)
        checked.append(np.array(sequence[:context], np.int64))
    return checked


def place_anchors(length: int, block_size: int, context: int, most: int) -> list[int]:
    """Where draft blocks begin in a sequence of `length` tokens: at most `most` positions.

    Each has context before it and room for its block; they are spread over the sequence, no
    nearer to each other than a block. Empty where a sequence is too short for one.
    """
    last = min(length - 1, context - block_size)
    if last < 1:
        return []
    count = min(most, max(1, (last - 1) // block_size))
    return [last - (last - 1) * index // count for index in reversed(range(count))]


def _unusable(what: str, number: int | None) -> DflashError:
    where = "calibration" if number is None else f"calibration sequence {number}"
    return DflashError(what, where=where, usage=True)

"""What changes a row of logits before a token is chosen from it, as OpenAI's API and, of the
repetition penalty, Hugging Face define it (arXiv 1909.05858)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from dflash_trt.core.arrays import FloatArray
from dflash_trt.errors import DflashError, one_line

MOST_PENALTY, MOST_BIAS, MOST_BIASED = 2.0, 100.0, 1024
LEAST_REPETITION, MOST_REPETITION = 0.01, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """By how much tokens are made less likely, or likelier; 0 and nothing by default.

    Args:
        frequency: taken off a token's logit for every time that the output has it already,
            -2 … 2.
        presence: taken off once if the output has it at all, -2 … 2.
        repetition: divides a logit above 0, and multiplies one below, of every token that prompt or
            output have, 0.01 … 2; comes first.
        bias: (token id, what is added to its logit, -100 … 100), at most 1,024, each token once.

    Raises:
        DflashError: a value outside its range (usage).
    """

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("frequency", self.frequency), ("presence", self.presence)):
            if not _is_within(value, MOST_PENALTY):
                what = f"{value!r} is not a number from -{MOST_PENALTY:g} to {MOST_PENALTY:g}"
                raise DflashError(what, where=f"{name}_penalty", usage=True)
        is_number = _is_within(self.repetition, MOST_REPETITION)
        if not is_number or self.repetition < LEAST_REPETITION:
            limits = f"from {LEAST_REPETITION:g} to {MOST_REPETITION:g}"
            what = f"{self.repetition!r} is not a number {limits}"
            raise DflashError(what, where="repetition_penalty", usage=True)
        if len(self.bias) > MOST_BIASED:
            what = f"names {len(self.bias):,} tokens, more than {MOST_BIASED:,}"
            raise DflashError(what, where="logit_bias", usage=True)
        for token_id, value in self.bias:
            if not _is_within(value, MOST_BIAS):
                shown = one_line(repr(value), 40)
                what = f"{shown} is not a number from -{MOST_BIAS:g} to {MOST_BIAS:g}"
                raise DflashError(what, where="logit_bias", usage=True)
            if type(token_id) is not int or token_id < 0:
                raise DflashError(f"{token_id!r} is no token id", where="logit_bias", usage=True)
        if len({token_id for token_id, _ in self.bias}) < len(self.bias):
            raise DflashError("names a token twice", where="logit_bias", usage=True)

    @property
    def is_neutral(self) -> bool:
        """Whether nothing changes."""
        return self.repetition == 1 and not (self.frequency or self.presence or self.bias)

    def apply(
        self, logits: FloatArray, counts: Mapping[int, int], prompt_ids: Iterable[int] = ()
    ) -> FloatArray:
        """A copy of the row [V] for an output that has each token `counts` times."""
        row = logits.copy()
        if self.repetition != 1:
            seen = np.array(sorted({*prompt_ids, *counts}), np.int64)
            factor = row.dtype.type(self.repetition)
            row[seen] = np.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
        if counts and (self.frequency or self.presence):
            ids = np.fromiter(counts.keys(), np.int64, len(counts))
            times = np.fromiter(counts.values(), row.dtype, len(counts))
            row[ids] -= times * row.dtype.type(self.frequency) + row.dtype.type(self.presence)
        for token_id, value in self.bias:
            row[token_id] += value
        return row


def _is_within(value: object, most: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -most <= value <= most  # NaN is not, and an integer may be too large for math.isfinite
